"""GPUs by name: their usable memory, and the memory left for caches.

A process can use less memory than the advertised size, because firmware, error correction
and page tables take some. The figures here are the totals that CUDA or ROCm reports,
rounded down.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.byte_sizes import size

GIB = 2**30

OVERHEAD = 3 * GIB
"""Bytes per rank for everything except weights and cache: about 1 GiB for the CUDA context and
NCCL buffers, about 2 GiB for CUDA graphs and the activations of 8,192 tokens in flight."""

MOST_GPUS = 1024
"""Limit on the number of GPUs that serve one model."""


class Gpu(NamedTuple):
    """A GPU model: its name, usable memory and advertised memory.

    >>> find_gpu("a100").name, find_gpu("H200").memory // GIB
    ('A100-80GB', 139)
    """

    name: str
    memory: int
    """Bytes of memory that a process can use."""
    sold: str
    """The advertised memory size."""


_TABLE = (
    # name, usable GiB, advertised size, other names
    ("A100-40GB", 39.3, "40 GB", ""),
    ("A100-80GB", 79.1, "80 GB", "A100"),
    ("H100", 79.1, "80 GB", "H100-80GB"),
    ("H20", 95.0, "96 GB", "H20-96GB"),
    ("H200", 139.8, "141 GB", "H200-141GB"),
    ("B200", 178.3, "192 GB, of which 180 can be used", "B200-180GB B200-192GB"),
    ("B300", 267.5, "288 GB", "B300-288GB"),
    ("GB200", 184.0, "192 GB, of which 186 can be used", "GB200-186GB GB200-192GB"),
    ("GH200", 94.5, "96 GB", "GH200-96GB"),
    ("T4", 14.5, "16 GB", "TESLA-T4"),
    ("A10G", 21.9, "24 GB", "A10"),
    ("L4", 22.0, "24 GB", ""),
    ("L40S", 44.4, "48 GB", ""),
    ("RTX-4090", 23.5, "24 GB", "4090"),
    ("RTX-5090", 31.3, "32 GB", "5090"),
    ("RTX-6000-Ada", 47.4, "48 GB", "6000-ADA"),
    ("MI300X", 191.5, "192 GB", ""),
    ("MI325X", 255.5, "256 GB", ""),
    ("MI355X", 287.5, "288 GB", ""),
)

GPUS = {name: Gpu(name, int(gib * GIB), sold) for name, gib, sold, _ in _TABLE}
"""All known GPUs by name."""


_NUMBER_FIRST = r"(?i)\s*(?P<number>\d{1,9})\s*[x*\u00d7]\s*(?P<name>.+)"
_NUMBER_LAST = r"(?i)(?P<name>.*\d\w?)\s*[x*\u00d7]\s*(?P<number>\d{1,9})\s*"
_SIZE = r"(?i)\s*(?P<number>\d{1,5})\s*(?P<unit>gi?b)\s*"
_UNITS = {"gb": "GB", "gib": "GiB"}


def _key(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


_BY_KEY = {
    _key(word): GPUS[name] for name, _, _, others in _TABLE for word in (name, *others.split())
}


class Gpus(NamedTuple):
    """A number of GPUs of one kind, on one or several hosts."""

    number: int
    """The number of GPUs on all hosts together."""
    gpu: Gpu
    per_host: int
    """The number of GPUs on each host."""

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.number // self.per_host


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name, by the name that its driver reports, or by its memory.

    Case, spaces and hyphens do not matter. A size such as `96GB` stands for a GPU on which a
    process can use this much memory.

    >>> find_gpu("NVIDIA H100 80GB HBM3").name, find_gpu("NVIDIA A100-SXM4-40GB").name
    ('H100', 'A100-40GB')
    >>> find_gpu("96GB").memory
    96000000000
    """
    sized = re.fullmatch(_SIZE, name)
    if sized is not None and int(sized["number"]) > 0:
        text = f"{int(sized['number'])} {_UNITS[sized['unit'].lower()]}"
        nbytes = int(sized["number"]) * (GIB if "i" in text else 10**9)
        return Gpu(text.replace(" ", ""), nbytes, text)
    key = re.sub(r"^(nvidia|amd)|sxm\d?|hbm\d*e?|pcie", "", _key(name))
    gpu = _BY_KEY.get(key)
    if gpu is not None:
        return gpu
    import difflib  # only needed if a name is unknown

    near = difflib.get_close_matches(_key(name), list(_BY_KEY), n=3, cutoff=0.5)
    names = list(dict.fromkeys(_BY_KEY[key].name for key in near)) or list(GPUS)
    hint = f"Did you mean {', '.join(names)}?" if near else f"Use one of {', '.join(names)}"
    raise AtlasError(Code.UNKNOWN_GPU, got=repr(name), hint=hint)


def find_gpus(text: str) -> Gpus:
    """Return the GPUs that a text such as `8xH100` names; the number defaults to 1.

    `2x8xH100` names two hosts with eight GPUs each.

    >>> found = find_gpus("2x8xH100")
    >>> found.number, found.gpu.name, found.per_host
    (16, 'H100', 8)
    """
    name, sizes = text, list[int]()
    while len(sizes) < 2 and (match := re.fullmatch(_NUMBER_FIRST, name)):
        sizes.append(int(match["number"]))
        name = match["name"]
    if not sizes and (match := re.fullmatch(_NUMBER_LAST, name)):
        sizes.append(int(match["number"]))
        name = match["name"]
    number = math.prod(sizes)
    if not 1 <= number <= MOST_GPUS:
        problem = f"The number of GPUs must be between 1 and {MOST_GPUS:,}"
        hint = "Write a number and a GPU, as in 8xH100"
        raise AtlasError(Code.BAD_QUANTITY, problem, got=repr(text), hint=hint)
    return Gpus(number, find_gpu(name), sizes[-1] if sizes else 1)


def memory_for_cache(
    gpu: Gpu,
    weights: int,
    *,
    utilization: float = 0.9,
    overhead: int = OVERHEAD,
    weights_source: str = "",
) -> int:
    """Return the bytes per rank left for caches: `utilization` x memory - weights - overhead.

    `weights` is the size of the weights, in bytes, on the rank with the most weights
    (`Weights.per_rank`). `weights_source` describes how this size was determined
    (`Weights.source`), for the error message.

    >>> memory_for_cache(find_gpu("H100"), 16_060_522_496) // GIB
    53
    >>> memory_for_cache(find_gpu("L4"), 40 * GIB)
    Traceback (most recent call last):
        ...
    kvatlas.errors.AtlasError: The weights leave no memory for a cache. Got 40 GiB of weights \
and 3 GiB of overhead per rank; 90% of an L4 is 19.8 GiB. Use more ranks, a larger GPU or smaller \
weights. [weights_too_large]
    """
    if not 0 < utilization <= 1:
        hint = "Pass the fraction of the GPU's memory to use, such as 0.9"
        problem = "`utilization` must be greater than 0 and at most 1"
        raise AtlasError(Code.BAD_QUANTITY, problem, got=utilization, hint=hint)
    if min(weights, overhead) < 0:
        raise AtlasError(
            Code.NEGATIVE,
            "`weights` and `overhead` must not be negative",
            got=f"weights {weights:,} and overhead {overhead:,} bytes",
            hint="Pass 0 or more bytes",
        )
    usable = int(gpu.memory * utilization)
    left = usable - weights - overhead
    if left > 0:
        return left
    article = "an" if gpu.name[0] in "AHLM" else "a"
    origin = f" ({weights_source})" if weights_source else ""
    raise AtlasError(
        Code.WEIGHTS_TOO_LARGE,
        got=f"{size(weights)} of weights{origin} and {size(overhead)} of overhead per rank; "
        f"{utilization:.0%} of {article} {gpu.name} is {size(usable)}",
        hint="Use more ranks, a larger GPU or smaller weights",
    )

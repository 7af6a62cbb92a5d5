"""GPUs by name: the memory that a process can have of each, and what is left for caches.

What is sold is not what a process gets: firmware, error correction and page tables take their
part first. The figures are what CUDA or ROCm reports as the device's total, rounded down.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.byte_sizes import size

GIB = 2**30

OVERHEAD = 3 * GIB
"""Bytes of a rank that are neither weights nor cache: about 1 GiB for the CUDA context and
NCCL's buffers, about 2 GiB for the activations of 8,192 tokens in flight and CUDA graphs."""

MOST_GPUS = 1024
"""More than any engine deals one model out to."""


class Gpu(NamedTuple):
    """A kind of GPU.

    >>> find_gpu("a100").name, find_gpu("H200").memory // GIB
    ('A100-80GB', 139)
    """

    name: str
    memory: int
    """Bytes that a process can have."""
    sold: str


_TABLE = (
    # name, usable GiB, as sold, other names
    ("A100-40GB", 39.3, "40 GB", ""),
    ("A100-80GB", 79.1, "80 GB", "A100"),
    ("H100", 79.1, "80 GB", "H100-80GB"),
    ("H200", 139.8, "141 GB", "H200-141GB"),
    ("B200", 178.3, "192 GB, of which 180 can be used", "B200-180GB B200-192GB"),
    ("B300", 267.5, "288 GB", "B300-288GB"),
    ("GH200", 94.5, "96 GB", "GH200-96GB"),
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
"""Every GPU that is known, by name."""


def _key(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


_BY_KEY = {
    _key(word): GPUS[name] for name, _, _, others in _TABLE for word in (name, *others.split())
}


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`, in any case and however it is hyphenated, or as its driver says.

    >>> find_gpu("NVIDIA H100 80GB HBM3").name, find_gpu("NVIDIA A100-SXM4-40GB").name
    ('H100', 'A100-40GB')
    """
    key = re.sub(r"^(nvidia|amd)|sxm\d?|hbm\d*e?|pcie", "", _key(name))
    gpu = _BY_KEY.get(key)
    if gpu is not None:
        return gpu
    near = difflib.get_close_matches(_key(name), list(_BY_KEY), n=3, cutoff=0.5)
    names = list(dict.fromkeys(_BY_KEY[key].name for key in near)) or list(GPUS)
    hint = f"Did you mean {', '.join(names)}?" if near else f"Use one of {', '.join(names)}"
    raise AtlasError(Code.UNKNOWN_GPU, got=repr(name), hint=hint)


def find_gpus(text: str) -> tuple[int, Gpu]:
    """How many GPUs, and which: `8xH100`, or one where no number is given.

    >>> number, gpu = find_gpus("8xH100")
    >>> number, gpu.name
    (8, 'H100')
    """
    first = re.fullmatch(r"\s*(?P<number>\d{1,9})\s*[x*\u00d7]\s*(?P<name>.+)", text, re.IGNORECASE)
    last = re.fullmatch(
        r"(?P<name>.*\d\w?)\s*[x*\u00d7]\s*(?P<number>\d{1,9})\s*", text, re.IGNORECASE
    )
    match = first or last
    if match is None:
        return 1, find_gpu(text)
    number = int(match["number"])
    if not 1 <= number <= MOST_GPUS:
        hint = f"Write a number from 1 to {MOST_GPUS:,}, as in 8xH100"
        raise AtlasError(Code.BAD_QUANTITY, "There is no such number of GPUs", got=text, hint=hint)
    return number, find_gpu(match["name"])


def memory_for_cache(
    gpu: Gpu, weights: int, *, utilization: float = 0.9, overhead: int = OVERHEAD
) -> int:
    """Bytes of a rank that are left for caches: a part of the GPU, less weights and overhead.

    `weights` are those of the rank that holds the most (`Weights.per_rank`).

    >>> memory_for_cache(find_gpu("H100"), 16_060_522_496) // GIB
    53
    >>> memory_for_cache(find_gpu("L4"), 40 * GIB)
    Traceback (most recent call last):
        ...
    kvatlas.errors.AtlasError: The weights leave no memory for a cache. Got 40 GiB of weights \
and 3 GiB of overhead for 19.8 GiB, 90% of an L4. Use more ranks, a larger GPU or smaller \
weights. [weights_too_large]
    """
    if not 0 < utilization <= 1:
        hint = "Write a part of the GPU's memory, such as 0.9"
        problem = "The utilization is not above 0 and at most 1"
        raise AtlasError(Code.BAD_QUANTITY, problem, got=utilization, hint=hint)
    if min(weights, overhead) < 0:
        raise AtlasError(Code.NEGATIVE, got=f"{min(weights, overhead)} bytes", hint="Use 0 or more")
    usable = int(gpu.memory * utilization)
    left = usable - weights - overhead
    if left > 0:
        return left
    article = "an" if gpu.name[0] in "AHLM" else "a"
    raise AtlasError(
        Code.WEIGHTS_TOO_LARGE,
        got=f"{size(weights)} of weights and {size(overhead)} of overhead "
        f"for {size(usable)}, {utilization:.0%} of {article} {gpu.name}",
        hint="Use more ranks, a larger GPU or smaller weights",
    )

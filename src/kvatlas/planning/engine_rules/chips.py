"""Chips by name, and the chip of each known GPU."""

from __future__ import annotations

from kvatlas.errors import AtlasError, Code

AMPERE = ("sm80", "sm86", "sm89")
"""Compute capabilities of Ampere and Ada GPUs."""
HOPPER = ("sm90",)
BLACKWELL = ("sm100", "sm103")
CONSUMER_BLACKWELL = ("sm120", "sm121")
CHIPS = (*AMPERE, *HOPPER, *BLACKWELL, *CONSUMER_BLACKWELL)
"""CUDA compute capabilities for which the tables have rules."""

RECORDED = (*AMPERE, *HOPPER, *BLACKWELL)
"""Chips whose rules were compared with plans that vLLM made for a chip of the same generation."""

_BY_GPU = {
    "A100-40GB": "sm80",
    "A100-80GB": "sm80",
    "A10G": "sm86",
    "L4": "sm89",
    "L40S": "sm89",
    "RTX-4090": "sm89",
    "RTX-6000-Ada": "sm89",
    "H100": "sm90",
    "H20": "sm90",
    "H200": "sm90",
    "GH200": "sm90",
    "B200": "sm100",
    "GB200": "sm100",
    "B300": "sm103",
    "RTX-5090": "sm120",
}


def chip_of(gpu: str) -> str | None:
    """Return the chip of a GPU; None if no rules for it are known.

    `gpu` is a name in `kvatlas.models.GPUS`.

    >>> chip_of("H200"), chip_of("MI300X")
    ('sm90', None)
    """
    return _BY_GPU.get(gpu)


def checked_chip(chip: str | None) -> str | None:
    """Return the argument if it is None or a known chip; otherwise raise an error.

    >>> checked_chip("hopper")
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: There is no such chip. Got 'hopper'. Use one of sm80, sm86, sm89, \
sm90, sm100, sm103, sm120, sm121. [unknown_gpu]
    """
    if chip is not None and chip not in CHIPS:
        hint = f"Use one of {', '.join(CHIPS)}"
        raise AtlasError(Code.UNKNOWN_GPU, "There is no such chip", got=repr(chip), hint=hint)
    return chip

"""The versions of transformers that this engine was tried with."""

from __future__ import annotations

import warnings

import transformers

FIRST, LAST = (5, 17), (5, 22)


def warn_of_untried_version(version: str = transformers.__version__) -> None:
    """Warn of a transformers release that nobody has tried this engine with.

    >>> warn_of_untried_version("5.20.1")
    """
    if not FIRST <= tuple(map(int, version.split(".")[:2])) <= LAST:
        tried = " to ".join(f"{major}.{minor}" for major, minor in (FIRST, LAST))
        warnings.warn(
            f"kvatlas was tried with transformers {tried}, and this is {version}: models of "
            "other versions may ask their cache for what AtlasCache does not know",
            stacklevel=3,
        )

"""The versions of transformers that this package is tested with."""

from __future__ import annotations

import warnings

import transformers

FIRST, LAST = (5, 17), (5, 23)


def warn_of_untried_version(version: str = transformers.__version__) -> None:
    """Warn if the installed transformers version has not been tested with this package.

    >>> warn_of_untried_version("5.20.1")
    """
    if not FIRST <= tuple(map(int, version.split(".")[:2])) <= LAST:
        tried = " to ".join(f"{major}.{minor}" for major, minor in (FIRST, LAST))
        warnings.warn(
            f"kvatlas is tested with transformers {tried}, but {version} is installed: its models "
            "may use cache methods that AtlasCache does not implement",
            stacklevel=3,
        )

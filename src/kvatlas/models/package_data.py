"""The data files of this package."""

from __future__ import annotations


def package_data(name: str) -> bytes:
    """Return the content of a data file, such as `catalogue.json`.

    >>> package_data("catalogue.json")[:1]
    b'['
    """
    from importlib import resources  # slow to import, and only needed to read a model

    return (resources.files("kvatlas.models") / name).read_bytes()

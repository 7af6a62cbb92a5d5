"""Human-readable byte sizes."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Format a number of bytes with a binary unit.

    >>> size(960), size(983040), size(96_030_720)
    ('960 B', '960 KiB', '91.6 MiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.3g} {units[0]}"

"""The command line: `kvatlas plan`, `explain`, `check`, `move`, `bench`, `models`, ...

This is the only package that uses typer and rich. typer and rich are optional, so this package
imports them when a command runs.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

_EXTRAS = ("typer", "rich", "click", "shellingham")
_UNAVAILABLE = 69


def main() -> None:
    """Run the command line. This is the entry point of the `kvatlas` script."""
    try:
        from kvatlas.cli.commands import run
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in _EXTRAS:
            raise
        sys.stderr.write(
            f"kvatlas: {missing.name} is not installed. Try: pip install 'kvatlas[cli]'\n"
        )
        raise SystemExit(_UNAVAILABLE) from None
    run()

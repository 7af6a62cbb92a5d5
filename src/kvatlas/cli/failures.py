"""What a user sees when something goes wrong: a message and an exit code, no traceback.

- A refusal (`AtlasError`) prints what is wrong, what was got, a hint and its code; exit 2,
  as for a misspelt option.
- A library that is not installed is one line with the extra that brings it; exit 69.
- Anything else is a defect of kvatlas and prints one line; exit 70. With
  KVATLAS_DEBUG=1 it is raised as it came.

Ctrl-C (exit 130) and a closed pipe (exit 1) are left to typer and rich.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from kvatlas.errors import AtlasError, Code

REFUSED = 2
UNAVAILABLE = 69
DEFECT = 70
DEBUG = "KVATLAS_DEBUG"

P = ParamSpec("P")


def plain(text: object) -> str:
    r"""Text from outside with whatever could steer a terminal written out.

    >>> plain("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in str(text)
    )


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """A command that ends in a message where it would end in an exception."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with no_traceback():
            command(*args, **kwargs)

    return run


@contextmanager
def no_traceback() -> Iterator[None]:
    """Turn exceptions into messages on stderr and exit codes."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except AtlasError as refusal:
        hint = refusal.hint if refusal.hint.endswith("?") else f"{refusal.hint}."
        if refusal.code is Code.MISSING_EXTRA:
            _tell(("kvatlas: ", f"{refusal.problem}. {hint}"))
            raise SystemExit(UNAVAILABLE) from None
        _tell(
            ("error: ", f"{refusal.problem}."),
            ("  got:  ", refusal.got),
            ("  hint: ", hint),
            ("  code: ", refusal.code),
        )
        raise SystemExit(REFUSED) from None
    except Exception as defect:
        if os.environ.get(DEBUG):
            raise
        cause = f"{type(defect).__name__}: {defect}"[:200]
        _tell(("kvatlas failed: ", f"{cause}. Set {DEBUG}=1 to see where, and please report it."))
        raise SystemExit(DEFECT) from None


def _tell(*lines: tuple[str, object]) -> None:
    console = Console(stderr=True, highlight=False)
    for number, (label, text) in enumerate(lines):
        line = Text(label, style="dim" if number else "bold red")
        line.append(plain(text), style="not dim not bold default")
        console.print(line, soft_wrap=True)

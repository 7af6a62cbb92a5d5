"""Turn exceptions into messages and exit codes.

- For an `AtlasError`, the problem, the value received, a hint and the code are printed. The exit
  code is 2, the same as for an unknown option.
- For a library that is not installed, one line with the name of the extra is printed. The exit
  code is 69.
- Any other exception is a bug in kvatlas. One line is printed, and the exit code is 70. With
  KVATLAS_DEBUG=1 the exception is raised with its traceback.

typer and rich handle Ctrl-C (exit code 130) and a closed pipe (exit code 1).
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
    r"""Return the text with control characters escaped, so that it cannot control the terminal.

    >>> plain("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in str(text)
    )


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command so that an exception becomes a message and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with no_traceback():
            command(*args, **kwargs)

    return run


@contextmanager
def no_traceback() -> Iterator[None]:
    """Run a block of code, and turn its exceptions into messages on stderr and exit codes."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except AtlasError as refusal:
        raise SystemExit(report(refusal)) from None
    except Exception as defect:
        if os.environ.get(DEBUG):
            raise
        cause = f"{type(defect).__name__}: {defect}"[:200]
        _tell(
            (
                "kvatlas failed: ",
                f"{cause}. This is a bug; please report it with the output of {DEBUG}=1.",
            )
        )
        raise SystemExit(DEFECT) from None


def report(refusal: AtlasError) -> int:
    """Print an error on stderr and return its exit code."""
    hint = refusal.hint if refusal.hint.endswith("?") else f"{refusal.hint}."
    if refusal.code is Code.MISSING_EXTRA:
        _tell(("kvatlas: ", f"{refusal.problem}. {hint}"))
        return UNAVAILABLE
    _tell(
        ("error: ", f"{refusal.problem}."),
        ("  got:  ", refusal.got),
        ("  hint: ", hint),
        ("  code: ", refusal.code),
    )
    return REFUSED


def _tell(*lines: tuple[str, object]) -> None:
    console = Console(stderr=True, highlight=False)
    for number, (label, text) in enumerate(lines):
        line = Text(label, style="dim" if number else "bold red")
        line.append(plain(text), style="not dim not bold default")
        console.print(line, soft_wrap=True)

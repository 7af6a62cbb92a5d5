"""A progress bar for slow commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[float], None] | None]:
    """Show a progress bar on stderr, and yield a function that sets the completed share (0 to 1).

    Yields None if stderr is not a terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda done: bar.update(task, completed=done)

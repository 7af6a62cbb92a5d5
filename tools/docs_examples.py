"""Examples in docstrings, fenced for the site: markdown would take `>>>` for a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*\n?(?:^(?! *$).*\n?)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    r"""Put a fence around every example, which ends at an empty line.

    >>> fenced("Adds.\n\n>>> 1 + 1\n2\n\nNo more.")
    'Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nNo more.'
    """
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", docstring)


class Examples(griffe.Extension):
    """Fences the examples of everything that has a docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)

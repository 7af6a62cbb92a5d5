"""`Map`: a drawing of a plan, or of the route between two plans."""

from __future__ import annotations

import html
from collections.abc import Iterable
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.maps.map_data import MapData
from kvatlas.maps.plan_drawing import draw_plan
from kvatlas.maps.route_drawing import draw_route
from kvatlas.maps.svg_picture import svg_picture
from kvatlas.maps.text_picture import text_picture
from kvatlas.models import find_gpu
from kvatlas.planning import Fit, Plan
from kvatlas.planning.plans import checked_plan

_SCRIPTS = (
    "geometry.js",
    "rows.js",
    "lines.js",
    "painting.js",
    "captions.js",
    "facts.js",
    "transfer.js",
    "groups.js",
    "bands.js",
    "controls.js",
    "search.js",
    "motion.js",
    "pointing.js",
    "page.js",
)
_FRAME = (
    '<iframe title="Map of {title}" srcdoc="{page}" '
    'style="width:100%;height:760px;border:0;border-radius:8px"></iframe>'
)


class Map:
    """A drawing of a plan, or of the route between two plans; it shows where every byte is stored.

    >>> import kvatlas
    >>> drawn = kvatlas.map(kvatlas.plan("gpt-oss-20b", memory="40GiB", layout="BHLNC"))
    >>> drawn
    <Map of gpt-oss-20b, layout BHLNC, blocks of 16>
    >>> len(drawn.html()) < 1_000_000
    True
    """

    def __init__(
        self,
        plan: Plan,
        to: Plan | None = None,
        *,
        others: Iterable[Plan] = (),
        fit: Fit | None = None,
        tokens: int | None = None,
    ) -> None:
        others = tuple(others)
        for given in (plan, *others) if to is None else (plan, to, *others):
            checked_plan(given)
        self.plan, self.to, self.others, self.fit = plan, to, others, fit
        self._tokens = tokens

    def __repr__(self) -> str:
        made, to = self.plan, self.to
        end = f" -> {to.layout}, blocks of {to.block_size}" if to else ""
        return f"<Map of {made.model}, layout {made.layout}, blocks of {made.block_size}{end}>"

    @cached_property
    def data(self) -> MapData:
        """The content of the drawing, as data that can be encoded as JSON."""
        names: dict[str, int] = {}
        ends = [self.plan] if self.to is None else [self.plan, self.to]
        plans = tuple(draw_plan(one, names) for one in dict.fromkeys((*ends, *self.others)))
        route = None if self.to is None else draw_route(self.plan, self.to, tokens=self._tokens)
        return MapData(
            title=self.plan.model,
            names=tuple(names),
            plans=plans,
            machine=self._machine(),
            route=route,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of the plan and, if the map has a fit, the warnings of the fit."""
        return self.plan.warnings if self.fit is None else self.fit.warnings

    def html(self) -> str:
        """Return a self-contained HTML page that works offline."""
        folder = resources.files("kvatlas.maps")
        page = (folder / "page.html").read_text("utf-8")
        script = "\n".join((folder / name).read_text("utf-8") for name in _SCRIPTS)
        # Names are untrusted. Escape `<`, so that a name cannot close the script element.
        data = msgspec.json.encode(self.data).decode().replace("<", "\\u003c")
        ends = f": {self.plan.layout} to {self.to.layout}" if self.to else ""
        parts = {
            "TITLE": html.escape(self.plan.model + ends),
            "STYLE": (folder / "page.css").read_text("utf-8"),
            "SCRIPT": script,
            "DATA": data,
        }
        before, *rest = page.split("<!--")
        return before + "".join(_filled(part, parts) for part in rest)

    def svg(self) -> str:
        """Return an SVG picture of one block of each group."""
        return svg_picture(self.data, 0)

    def text(self, width: int = 80) -> str:
        """Return a drawing made of characters, for a terminal. It shows one block of each group."""
        return text_picture(self.data, 0, width)

    def save(self, path: str | Path, *, form: str = "") -> Path:
        """Write the drawing to a file and return its path.

        `form` is html, svg or txt. By default, the suffix of the path determines the form, and an
        unknown suffix means html.
        """
        path = Path(path)
        wanted = form or path.suffix.lower().removeprefix(".")
        made = {"svg": self.svg, "txt": self.text}.get(wanted, self.html)()
        try:
            path.write_text(made, "utf-8")
        except (OSError, ValueError) as problem:  # a ValueError is an invalid file name
            reason = problem.strerror if isinstance(problem, OSError) else problem
            raise AtlasError(
                Code.UNWRITABLE,
                "The map cannot be written to the file",
                got=f"{path}: {reason}",
                hint="Pass save() a path in an existing, writable folder",
            ) from problem
        return path

    def _repr_html_(self) -> str:
        """Return the HTML page in an iframe, for notebooks."""
        title = html.escape(self.plan.model, quote=True)
        return _FRAME.format(title=title, page=html.escape(self.html(), quote=True))

    def _machine(self) -> dict[str, Any] | None:
        if self.fit is None:
            return None
        gpu = find_gpu(self.fit.gpu)
        return {
            "gpu": gpu.name,
            "memory": gpu.memory,
            "weights": self.fit.weights,
            "weights_source": self.fit.weights_source,
            "weights_warnings": list(self.fit.weights_warnings),
            "overhead": self.fit.overhead,
        }


def _filled(part: str, values: dict[str, str]) -> str:
    """Return a part of the HTML template, with the comment at its start replaced by a value.

    `part` is the text after a `<!--`. The text of the comment is the key of the value in `values`.
    If there is no such key, the comment is unchanged.
    """
    name, end, text = part.partition("-->")
    return values[name] + text if end and name in values else "<!--" + part


def map(  # noqa: A001 - the public name is kvatlas.map
    plan: Plan,
    to: Plan | None = None,
    *,
    others: Iterable[Plan] = (),
    fit: Fit | None = None,
    tokens: int | None = None,
) -> Map:
    """Draw a plan, or the route from one plan to another.

    `others` are plans of the same model, which the reader can select with the controls of the HTML
    page. `fit` describes the rest of the GPU's memory. `tokens` is the length of the request that
    the route copies. A notebook displays the returned map.
    """
    return Map(plan, to, others=others, fit=fit, tokens=tokens)

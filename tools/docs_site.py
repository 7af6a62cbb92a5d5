"""Walk the built site, and fail on a missing menu group, a broken link or an external resource.

    python tools/docs_site.py site

The menu must have the four groups, in order, and lead to every page. Links between pages must
lead to a file, and their fragments to an element of it. Pages may link to other hosts, but
images, scripts, styles and frames must come from the site itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

GROUPS = ("Tutorials", "How-to", "Reference", "Explanation")
EMBEDDED = ("map/index.html",)
"""Pages that others show in a frame, so that the menu does not list them."""
_LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that make a browser load something, and the attribute that names it."""
_NOT_LOADED = {"canonical", "edit", "next", "prev", "alternate"}
"""Kinds of `<link>` that only name another page."""
_VOID = {"img", "link", "meta", "input", "br", "hr", "source", "path", "area", "base", "col", "wbr"}


@dataclass
class Page(HTMLParser):
    """The links, resources, element ids and menu of one page."""

    file: Path
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    groups: list[str] = field(default_factory=list)
    menu: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, str]] = []
        self.feed(self.file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what the element links to or loads, and its id."""
        named = {name: value or "" for name, value in attrs}
        self.ids |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
            if self._in("nav", "md-nav--primary"):
                self.menu.append(named["href"])
        kind = set(named.get("rel", "").split())
        if named.get(_LOADED.get(tag, "")) and not (tag == "link" and kind & _NOT_LOADED):
            self.loaded.append(named[_LOADED[tag]])
        if tag not in _VOID:
            self._open.append((tag, named.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        """Close the element, and those inside that HTML need not close."""
        while any(name == tag for name, _ in self._open):
            if self._open.pop()[0] == tag:
                return

    def handle_data(self, data: str) -> None:
        """Collect the titles of the menu's sections."""
        section = self._in("li", "md-nav__item--section") and self._in("label", "md-nav__link")
        if section and self._in("span", "md-ellipsis") and data.strip():
            self.groups.append(data.strip())

    def _in(self, tag: str, style: str) -> bool:
        return any(name == tag and style in styles.split() for name, styles in self._open)


@cache
def _page(file: Path) -> Page:
    return Page(file)


def _target(site: Path, page: Path, link: str) -> tuple[Path, str] | None:
    """Return the file and the fragment that a link leads to; None for another host."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    path = unquote(parts.path)
    base = site if path.startswith("/") else page.parent
    file = (base / path.lstrip("/")).resolve() if path else page
    return (file / "index.html" if file.is_dir() else file), unquote(parts.fragment)


def problems(site: Path) -> list[str]:
    """Return what is wrong with a built site, one line for each problem."""
    site = site.resolve()
    pages = {file.resolve() for file in site.rglob("*.html")} - {site / "404.html"}
    home = _page(site / "index.html")
    found = []
    if tuple(group for group in home.groups if group in GROUPS) != GROUPS:
        found.append(f"The menu's groups must be {', '.join(GROUPS)}; got {home.groups}.")
    targets = (_target(site, home.file, link) for link in home.menu)
    listed = {target[0] for target in targets if target}
    unlisted = pages - listed - {site / name for name in EMBEDDED}
    found += [f"{file.relative_to(site)}: not in the menu." for file in sorted(unlisted)]
    for file in sorted(pages):
        page = _page(file)
        name = file.relative_to(site)
        for link in (*page.links, *page.loaded):
            target = _target(site, file, link)
            if target is None:
                if link in page.loaded and not link.startswith("data:"):
                    found.append(f"{name}: loads {link} from another host.")
            elif not target[0].is_file():
                found.append(f"{name}: {link} leads nowhere.")
            elif target[1] and target[0].suffix == ".html" and not _has(target):
                found.append(f"{name}: {link} names no element of its page.")
    return found


def _has(target: tuple[Path, str]) -> bool:
    file, fragment = target
    return fragment in _page(file).ids or fragment == "__skip"


def main(site: Path) -> int:
    """Print the problems of a site, or what was checked."""
    found = problems(site)
    print(
        "\n".join(found) or f"{site}: the menu has {', '.join(GROUPS)}; all links lead somewhere."
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

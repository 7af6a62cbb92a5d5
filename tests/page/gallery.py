"""Maps of some models, and pictures of them: every width, light, dark and on paper.

    python -m tests.page.gallery FOLDER MODEL ...

Where there is no browser, the pages are made and it says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvatlas.cli.draw import draw
from kvatlas.cli.options import PlanOptions
from tests.page.browser import Browser, NoBrowserError, chromium

SIZES = {400: 800, 1280: 900, 3840: 2160}
"""Widths that are looked at, and how high the window is then."""


def make_page(model: str, folder: Path) -> Path:
    """The page that `kvatlas map MODEL` writes."""
    drawn = draw(PlanOptions(model=model), None, None, tokens=None, knobs=True)
    return drawn.save(folder / f"{Path(model).name}.html")


def take_pictures(browser: Browser, page: Path) -> None:
    """PNGs beside a page for every width, light and dark, and a PDF."""
    browser.command("Emulation.setScrollbarsHidden", hidden=True)
    for width, height in SIZES.items():
        browser.resize(width, height)
        for colours in ("light", "dark"):
            browser.prefer(prefers_color_scheme=colours, prefers_reduced_motion="reduce")
            browser.open(page.absolute())
            # No scroll bar is in the picture: nothing is kept free for it, either.
            browser.do("document.documentElement.style.scrollbarGutter = 'auto'; updateAll()")
            picture = page.with_name(f"{page.stem}-{width}-{colours}.png")
            picture.write_bytes(browser.picture(width))
    browser.resize(1280, 900)
    page.with_suffix(".pdf").write_bytes(browser.printed())


def main() -> None:
    """Write the pages, then their pictures."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    pages = [make_page(model, folder) for model in sys.argv[2:]]
    try:
        with chromium() as browser:
            for page in pages:
                take_pictures(browser, page)
                print(f"{page}, its pictures and its print")
    except NoBrowserError as missing:
        print(f"{len(pages)} pages in {folder}, no pictures: {missing}.")


if __name__ == "__main__":
    main()

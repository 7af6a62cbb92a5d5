"""Curves over memory in a real browser: no requests, no wider than a telephone, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvatlas.maps import Curve, CurveText, curves_page
from tests.page.browser import NoBrowserError, chromium

NAMES = ("Qwen3.5-397B-A17B policy vllm", "Qwen3.5-397B-A17B policy atlas", "<b>&amp;\"'")


def test_curves_need_no_network_and_fit_a_telephone(tmp_path: Path) -> None:
    points = tuple((1 << 30 + n, n / 10) for n in range(7))
    curves = [Curve(name, points[place:]) for place, name in enumerate(NAMES)]
    columns = ("curve", "memory", "found", "computed again", "evicted")
    rows = [(name, "1 GiB", "12.3%", "123,456,789", "123,456") for name in NAMES]
    page = tmp_path / "curves.html"
    page.write_text(curves_page(curves, 0.65, CurveText("a trace", "note", "foot", columns, rows)))
    grounds = set()
    try:
        with chromium() as browser:
            for width in (400, 1280):
                for colours in ("light", "dark"):
                    browser.prefer(prefers_color_scheme=colours)
                    browser.resize(width, 900)
                    browser.open(page)
                    assert browser.do("return document.documentElement.scrollWidth") == width
                    assert browser.do("return document.querySelectorAll('b').length") == 0
                    size = "return document.querySelector('svg text').getBoundingClientRect()"
                    assert browser.do(f"{size}.height") >= 8
                    style = "return getComputedStyle(document.documentElement).backgroundColor"
                    grounds.add(browser.do(style))
            assert browser.complaints() == []
    except NoBrowserError as missing:
        pytest.skip(str(missing))
    assert len(grounds) == 2

"""What `make map-figures` measures: the answer to what was asked last, where a reader sees it."""

from __future__ import annotations

from pathlib import Path

import kvatlas
from kvatlas.planning import plan
from tests.page.browser import Browser
from tests.page.figures import ARM, PLACES, REST


def test_what_is_asked_is_in_sight_and_answers_for_itself_alone(
    browser: Browser, tmp_path: Path
) -> None:
    ends = [plan("gpt-oss-20b", memory="40GiB", layout=order) for order in ("LBNHC", "BHLNC")]
    browser.resize(400, 800)
    try:
        browser.open(kvatlas.map(*ends).save(tmp_path / "map.html"))
        for name, place in PLACES.items():
            browser.wait_for(REST, place)
            top = browser.do("return byId(arguments[0]).getBoundingClientRect().top", place)
            assert -1 < top < 400, name
        count = "window.ended = [];"
        count += "PerformanceObserver.prototype.disconnect = function () { ended.push(this); };"
        browser.do(count)
        for _ in range(3):
            browser.do(ARM, "")
        assert browser.do("return new Set(ended).size") == 2
        assert browser.do("return !ended.includes(watch)")
    finally:
        browser.resize(1280, 900)


def test_a_page_may_ask_for_no_file_but_its_own(browser: Browser, tmp_path: Path) -> None:
    beside, page = tmp_path / "beside.css", tmp_path / "page.html"
    beside.write_text("")
    page.write_text('<link rel="icon" href="data:,"><link rel="stylesheet" href="beside.css">')
    browser.open(page)
    assert browser.complaints() == [beside.as_uri()]
    browser.open(page, beside)
    assert browser.complaints() == []

"""Finding one's way on the page: searches, knobs, keys, and what is said of what is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvatlas
from kvatlas.planning import Plan, plan
from tests.page.browser import Browser


def show(browser: Browser, tmp_path: Path, *args: Plan, **options: Any) -> None:
    browser.open(kvatlas.map(*args, **options).save(tmp_path / "map.html"))


def test_keys_search_clicks_and_the_wheel_move_about(browser: Browser, tmp_path: Path) -> None:
    made = plan("gpt-oss-20b", memory="40GiB", layout="BLNHC")
    show(browser, tmp_path, made)
    level = "return view.level"
    for wanted in ("page", "cell"):
        browser.do("picture.scrollIntoView({ block: 'center' })")
        box = browser.do("const b = picture.getBoundingClientRect(); return [b.left, b.top]")
        x = browser.do("return drawn.place.left") + 30
        for kind in ("mousePressed", "mouseReleased"):
            browser.point(box[0] + x, box[1] + 20, kind)
        assert browser.do(level) == wanted
    address = made.view("model.layers.3.attn.attn", "v")(B=5, H=2, N=7, C=9)
    searches = {
        "block 12": "return view.block === 12",
        "layers.5.": "return data.names[paint.follow.value].includes('.5.')",
        "head 3": "return paint.follow.kind === 'head' && paint.follow.value === 3",
        "token 4": "return byId('followed').textContent.startsWith('Token 4: ')",
        str(address): f"return view.level === 'cell' && cursor.point.address === {address}",
        "no such thing": "return byId('query').getAttribute('aria-invalid') === 'true'",
    }
    for text, holds_true in searches.items():
        browser.do("byId('query').value = arguments[0]; byId('search').requestSubmit()", text)
        assert browser.do(holds_true), text
    browser.do("go({ level: 'cell' }); picture.focus()")
    for wanted in ("page", "block", "pool", "memory"):
        browser.do("picture.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }))")
        assert browser.do(level) == wanted
    browser.do("picture.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }))")
    assert browser.do(level) == "pool"
    browser.do("picture.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown' }))")
    browser.do(
        """
        picture.scrollIntoView({ block: "start" });
        const box = picture.getBoundingClientRect(), at = { clientX: box.left + 300, clientY: 30 };
        picture.dispatchEvent(new WheelEvent("wheel", { deltaY: -120, ...at, cancelable: true }));
        """
    )
    assert browser.do(level) == "block"
    assert browser.complaints() == []


def find(browser: Browser, text: str) -> str:
    """Ask the search box; what is said beside it."""
    browser.do("byId('query').value = arguments[0]; byId('search').requestSubmit()", text)
    return str(browser.do("return byId('found').textContent"))


FACTS = """
return Object.fromEntries([...document.querySelectorAll('#facts dd')]
  .map((one) => [one.dataset.fact, one.textContent]))
"""


def test_a_search_combines_layer_head_and_token_and_says_what_is_not_there(
    browser: Browser, tmp_path: Path
) -> None:
    made = [plan("Qwen3-8B", memory="40GiB", tp=2, layout=order) for order in ("LBNHC", "BHLNC")]
    show(browser, tmp_path, made[0], others=made[1:])
    for index, one in enumerate(made):
        browser.do("change({ plan: arguments[0], tpRank: 0, block: 0 })", index)
        told = find(browser, "layer 3, head 5, token 100")
        assert "head 5 is on rank 1; token 100 is token 4 of block 6" in told
        assert browser.do("return [view.level, view.block, view.tpRank]") == ["cell", 6, 1]
        facts = browser.do(FACTS)
        address = one.view("model.layers.3.self_attn.attn", "k")(B=6, H=1, N=4, C=0)
        assert facts["address"] == f"{address:,}"
        assert facts["head"].startswith("5 ")
        # What is shown without pointing is in view, too: a page's first byte is of its layer.
        browser.do("go({ level: 'page' })")
        assert ".3." in browser.do(FACTS)["layer"]
        assert browser.do("return document.querySelector('[data-kind=layer]').innerText") == (
            "one layer, 3"
        )
    assert "token 4 of block 6, if a request fills" in find(browser, "token 100")
    assert browser.do("return [view.level, view.block, paint.follow.value]") == ["block", 6, 4]
    assert "Token 4: " in browser.do("return byId('followed').textContent")
    browser.do("change({ tpRank: 0 })")
    assert find(browser, "head 5") == "head 5 is on rank 1"
    assert browser.do("return [view.tpRank, paint.follow.value]") == [1, 5]
    find(browser, "layer 3, head 5")
    assert browser.do("return [view.level, paint.follow.kind]") == ["page", "head"]
    assert browser.do(FACTS)["head"].startswith("5 "), "a pixel's other byte is told of"
    browser.do("change({ block: 0 })")
    assert browser.do("return byId('tip').hidden")
    missing = {
        "layer 40": "no layer 40: layers 0 to 35",
        "head 9": "no head 9: heads 0 to 7",
        "block 3, token 16": "no token 16 in a block: tokens 0 to 15",
        "head 5, rank 0": "head 5 is not on rank 0, but on rank 1",
        "rank 2": "no rank 2: ranks 0 to 1",
        "banana": "nothing is called \u201cbanana\u201d",
        "padding": "no padding",
    }
    for text, told in missing.items():
        browser.do("paint.follow = { kind: 'head', value: 5 }; update()")
        assert told in find(browser, text), text
        assert browser.do("return paint.follow") is None, "the last search is still lit"
    find(browser, "head 5")
    assert find(browser, " ") == ""
    assert browser.do("return paint.follow") is None, "an empty box lets go"
    find(browser, "head 5")
    browser.do("change({ tpRank: 0 })")
    assert browser.do("return paint.follow") is None, "what is not on this rank is followed"
    assert browser.complaints() == []


def test_a_route_says_its_ends_and_how_drawn_runs_make_up_all(
    browser: Browser, tmp_path: Path
) -> None:
    ends = [
        plan("Qwen3-8B", memory="40GiB", tp=tp, layout=order)
        for tp, order in ((2, "LBNHC"), (4, "BHLNC"))
    ]
    drawn = kvatlas.map(*ends, tokens=4096)
    browser.open(drawn.save(tmp_path / "map.html"))
    title = browser.do("return [document.title, byId('title').textContent]")
    assert title[0].startswith("Qwen3-8B: LBNHC to BHLNC")
    assert "LBNHC, tp 2, blocks of 16 \N{RIGHTWARDS ARROW} BHLNC, tp 4, blocks of 16" in title[1]
    note, times = browser.do("return byId('route-note').textContent"), "\N{MULTIPLICATION SIGN}"
    assert drawn.data.route
    runs = drawn.data.route.pairs[0].counted
    assert drawn.data.route.check["descriptors"] == runs * 256 * 4
    assert f": {runs:,} runs {times} 256 blocks of 16 tokens {times} 4 pairs of ranks." in note
    asked = browser.do("return byId('run-facts').innerText")
    over = """
    const box = byId("bands").getBoundingClientRect();
    const at = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 };
    byId("bands").dispatchEvent(new MouseEvent("mousemove", at));
    return byId("run-facts").innerText;
    """
    assert "bytes in one run" in browser.do(over)
    browser.do("document.querySelectorAll('#pairs tr')[3].focus()")
    browser.do("document.activeElement.click()")
    chosen = "return [document.activeElement.rowIndex, document.activeElement.ariaSelected]"
    assert browser.do(chosen) == [3, "true"]
    marked = "return document.querySelectorAll('#pairs [aria-selected=true]').length"
    assert browser.do(marked) == 1
    assert browser.do("return byId('run-facts').innerText") == asked, "a run of other ranks"
    assert "bytes in one run" in browser.do(over)


def test_other_orders_are_counted_for_the_plan_shown_and_knobs_say_what_they_change(
    browser: Browser, tmp_path: Path
) -> None:
    sizes = (("LBNHC", 16), ("BHLNC", 16), ("LBNHC", 32), ("BHLNC", 32), ("BLNHC", 16))
    made = [plan("Qwen3-8B", memory="40GiB", layout=o, block_size=n) for o, n in sizes]
    made.append(plan("Qwen3-8B", memory="40GiB", layout="LBNHC", tp=8))
    show(browser, tmp_path, made[0], others=made[1:])
    turn = "document.querySelector(`#knobs [aria-label=${arguments[0]}] [value='${arguments[1]}']`)"
    followed = "return byId('followed').textContent.replaceAll('\\u00a0', ' ')"
    note = "return byId('knobs-note').textContent"
    browser.do(turn + ".click()", "block", "32")
    assert browser.do(followed).endswith("Runs in other orders: BHLNC 1, BLNHC 576 (block 16).")
    browser.do(turn + ".click()", "order", "BHLNC")
    assert "Runs in other orders: LBNHC 1,152, BLNHC 576 (block 16)." in browser.do(followed)
    grey = "Grey: the page has no plan of this value with the others; choosing it changes them."
    assert browser.do(note) == grey
    marked = "return [...document.querySelectorAll('#knobs .apart')].map((one) => one.value)"
    assert browser.do(marked) == ["BLNHC", "8"]
    said = "The page has no plan of tp 8 with order BHLNC, block 32; showing order LBNHC, block"
    assert browser.do("return " + turn + ".title", "tp", "8") == f"{said} 16."
    browser.do(turn + ".click()", "tp", "8")
    assert browser.do(note) == f"{said} 16."
    assert browser.do(marked) == ["BHLNC", "BLNHC", "32"]
    # For a select that comes or goes, the browser paints the whole page anew.
    assert browser.do("return document.querySelectorAll('#knobs select').length") == 0
    assert "other orders" not in browser.do(followed)
    # All of a line of the table chooses it.
    browser.do("document.querySelector('#transfer .choice td:last-child').click()")
    assert browser.do("return paint.follow.kind") == "layer"
    assert browser.do("return byId('words').innerText.includes('Words')")
    scrolls = "picture.blur(); picture.dispatchEvent(new WheelEvent('wheel', { deltaY: 120 }));"
    assert browser.do(scrolls + "return view.level") == "block"


def test_packs_are_seen_in_the_order_of_axes_and_rows_of_one_layer_told_apart(
    browser: Browser, tmp_path: Path
) -> None:
    packs, pools = (
        plan("Qwen3.5-397B-A17B", memory="80GiB", layout=order) for order in ("LBNHC", "LHBNC")
    )
    show(browser, tmp_path, packs, others=[pools])
    summary = "change({ plan: 1 }); const told = summary(); change({ plan: 0 }); return told"
    assert "for 2 groups of layers" in browser.do(summary), "they share no pool"
    order = browser.do("return byId('order').innerText.replaceAll('\\n', ' ')")
    assert order.startswith("L 5 packs of layers B ")
    assert "5 \N{MULTIPLICATION SIGN} 3 \N{MULTIPLICATION SIGN} 704 = 10,560 runs" in browser.do(
        "return byId('followed').textContent"
    )
    assert browser.do("return new Set(drawn.labels).size === drawn.labels.length")
    assert "the first padding of block 0, used by recurrent" in find(browser, "padding")
    facts = browser.do(FACTS)
    assert "57,344 bytes after the page" in facts["padding"]
    assert facts["address"] == f"{4_325_376 - 57_344:,}"
    assert browser.complaints() == []


def test_a_finger_points_with_its_first_tap_and_goes_in_with_the_second(
    browser: Browser, tmp_path: Path
) -> None:
    words = "return [byId('facts-title'), byId('transfer-note'), document.querySelector('footer')]"
    words += ".map((one) => one.innerText).join(' ')"
    browser.command("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=1)
    try:
        browser.resize(400, 800)
        show(browser, tmp_path, plan("gpt-oss-20b", memory="40GiB", layout="BLNHC"))
        told = browser.do(words)
        assert told.startswith("First byte in view; tap another")
        assert "same place again to go in" in told
        assert not any(word in told for word in ("wheel", "Shift", "click", "Point"))
        browser.do("picture.scrollIntoView({ block: 'center' })")
        left, top = browser.do("const b = picture.getBoundingClientRect(); return [b.left, b.top]")
        x, y = left + browser.do("return drawn.place.left") + 30, top + 20
        seen = "return [view.level, byId('tip').hidden, byId('facts-title').textContent]"
        tap(browser, x, y)
        assert browser.do(seen) == ["block", False, "This byte"]
        tap(browser, x + 100, y)
        assert browser.do(seen)[0] == "block", "another place is pointed at first"
        tap(browser, x + 95, y + 2)
        assert browser.do(seen)[0] == "page"
        assert browser.complaints() == []
    finally:
        browser.command("Emulation.setTouchEmulationEnabled", enabled=False)
        browser.resize(1280, 900)


def tap(browser: Browser, x: float, y: float) -> None:
    """Touch a place of the window, and wait for the click that the browser makes of it."""
    browser.do("window.clicks = 0; addEventListener('click', () => clicks++, { once: true })")
    points = [{"x": x, "y": y}]
    browser.command("Input.dispatchTouchEvent", type="touchStart", touchPoints=points)
    browser.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    wait = "const wait = () => clicks ? arguments[0]() : setTimeout(wait, 10); wait();"
    browser.wait_for("const [done] = arguments;" + wait.replace("arguments[0]", "done"))

"""The page as it is read: keys, widths, motions, paper; very large plans; words that explain."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kvatlas
from kvatlas.models import catalogue
from kvatlas.planning import Plan, plan
from tests.page.browser import Browser
from tests.page.large_plan import large_plan


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
    assert "token 4 of block 6, where a request fills" in find(browser, "token 100")
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
    browser.do("change({ tpRank: 0 })")
    assert browser.do("return paint.follow") is None, "what is not on this rank is followed"
    assert browser.complaints() == []


def test_the_page_fits_every_width_in_light_and_dark(browser: Browser, tmp_path: Path) -> None:
    made = plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2)
    try:
        for width in (400, 1280, 3840):
            for colours in ("light", "dark"):
                browser.resize(width, 900)
                browser.prefer(prefers_color_scheme=colours, prefers_reduced_motion="reduce")
                show(browser, tmp_path, made)
                # Also where the first drawing is what makes the page so high that it scrolls.
                assert browser.do("return picture.width === byId('stage').clientWidth")
                for level in ("memory", "pool", "block"):
                    browser.do("go({ level: arguments[0] })", level)
                    across = "return document.documentElement.scrollWidth"
                    assert browser.do(across) <= width, (width, level)
                took = browser.do(
                    "const at = performance.now(); update(); return performance.now() - at"
                )
                assert took < 5000
        assert browser.complaints() == []
    finally:
        browser.resize(1280, 900)
        browser.prefer(prefers_reduced_motion="reduce")


def test_every_model_of_the_catalogue_is_drawn_without_complaint(
    browser: Browser, tmp_path: Path
) -> None:
    for name in catalogue():
        page = kvatlas.map(plan(name, memory="2TiB")).save(tmp_path / "map.html")
        assert page.stat().st_size < 1_000_000
        browser.open(page)
        assert browser.do("return drawn.rows.length && byId('facts').children.length"), name
        assert browser.complaints() == [], name


def test_a_million_blocks_and_thousands_of_layers_are_a_sample_that_says_so(
    browser: Browser, tmp_path: Path
) -> None:
    for order in ("LBNHC", "BHLNC"):
        show(browser, tmp_path, large_plan(order))
        assert browser.do("return drawn.rows.length") <= 200
        said = browser.do("return byId('caption').textContent")
        assert ("of 4,096 rows" in said) == (order == "LBNHC")
        browser.do("go({ level: 'pool' })")
        assert "of 1,000,000; the others lie alike" in browser.do(
            "return byId('caption').textContent"
        )
        browser.do("byId('query').value = 'layers.4095'; byId('search').requestSubmit()")
        assert "4095" in browser.do("return byId('followed').textContent")
    assert browser.complaints() == []


def test_what_is_in_a_hidden_frame_is_drawn_once_it_is_shown(
    browser: Browser, tmp_path: Path
) -> None:
    page = kvatlas.map(plan("gpt-oss-20b", memory="4GiB")).save(tmp_path / "map.html")
    outer = tmp_path / "outer.html"
    outer.write_text(f'<iframe src="{page.name}" width="900" height="700" style="display:none">')
    browser.open(outer)
    browser.do("document.querySelector('iframe').style.display = 'block'")
    assert browser.complaints() == []


def two_orders(model: str) -> list[Plan]:
    return [plan(model, memory="40GiB", layout=order) for order in ("LBNHC", "BHLNC")]


def test_the_picture_is_never_copied_onto_itself(browser: Browser, tmp_path: Path) -> None:
    """The browser would copy the whole of it for each row: seconds, on a large screen."""
    first, *others = two_orders("Qwen3-8B")
    show(browser, tmp_path, first, others=others)
    copies = browser.do(
        """
        const drawImage = CanvasRenderingContext2D.prototype.drawImage;
        let copies = 0;
        CanvasRenderingContext2D.prototype.drawImage = function (source, ...rest) {
          if (source === this.canvas) copies++;
          drawImage.call(this, source, ...rest);
        };
        for (const plan of [0, 1]) {
          change({ plan });
          for (const level of ["pool", "block"]) go({ level });
        }
        return copies;
        """
    )
    assert copies == 0


def test_a_motion_ends_as_the_still_picture_and_gives_way_to_what_comes_next(
    browser: Browser, tmp_path: Path
) -> None:
    first, *others = two_orders("gpt-oss-20b")
    picture = "return picture.toDataURL()"
    try:
        show(browser, tmp_path, first, others=others)
        browser.do("change({ plan: 1 })")
        still = browser.do(picture)
        browser.do("paint.chosen = 'layer'; update()")
        coloured = browser.do(picture)
        browser.prefer(prefers_reduced_motion="no-preference")
        show(browser, tmp_path, first, others=others)
        moving = "change({ plan: 1 }); setTimeout(arguments[0], 1500)"
        browser.wait_for(moving)
        assert browser.do(picture) == still
        show(browser, tmp_path, first, others=others)
        next_click = "change({ plan: 1 }); paint.chosen = 'layer'; update();"
        frames = "const [done] = arguments, next = requestAnimationFrame;"
        seen = "const wait = () => painting || wordsDue ? next(wait)"
        seen += " : next(() => next(() => done(picture.toDataURL()))); wait()"
        assert browser.wait_for(frames + next_click + seen) == coloured
    finally:
        browser.prefer(prefers_reduced_motion="reduce")


def test_bands_that_are_painted_some_in_each_frame_are_all_painted(
    browser: Browser, tmp_path: Path
) -> None:
    ends = two_orders("gpt-oss-20b")
    every = "[...byId('shown').querySelectorAll('button, option')].pop().click();"
    painted = "return byId('bands').toDataURL()"
    try:
        show(browser, tmp_path, *ends)
        browser.do(every)
        at_once = browser.do(painted)
        browser.prefer(prefers_reduced_motion="no-preference")
        show(browser, tmp_path, *ends)
        wait = "const wait = () => columns.still ? done() : setTimeout(wait, 20); wait();"
        browser.wait_for("const [done] = arguments;" + every + wait)
        assert browser.do("return columns.runs.length > 2 * BANDS_AT_ONCE")
        assert browser.do(painted) == at_once
    finally:
        browser.prefer(prefers_reduced_motion="reduce")


def sheets(browser: Browser) -> int:
    return len(re.findall(rb"/Type\s*/Page\b", browser.printed()))


def test_a_route_prints_on_one_sheet(browser: Browser, tmp_path: Path) -> None:
    for model, src, dst in (
        ("Qwen3-8B", 4, 8),
        ("DeepSeek-V4-Pro", 1, 2),
        ("Llama-3.1-405B", 8, 4),
    ):
        ends = [plan(model, memory="80GiB", tp=tp) for tp in (src, dst)]
        show(browser, tmp_path, *ends)
        assert sheets(browser) == 1, model


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
    browser.do("document.querySelectorAll('#pairs tr')[3].click()")
    assert browser.do("return byId('run-facts').innerText") == asked, "a run of other ranks"
    assert "bytes in one run" in browser.do(over)


def test_a_page_prints_on_one_sheet(browser: Browser, tmp_path: Path) -> None:
    for model in ("gpt-oss-20b", "Qwen3.5-397B-A17B", "DeepSeek-V4-Pro", "Llama-3.1-405B"):
        show(browser, tmp_path, plan(model, memory="80GiB"))
        assert sheets(browser) == 1, model
        frames = "const [done] = arguments, next = requestAnimationFrame;"
        browser.wait_for(frames + "next(() => next(done))")
        assert browser.do("return picture.width === byId('stage').clientWidth"), model


def test_the_page_says_why_something_lies_in_so_many_runs(browser: Browser, tmp_path: Path) -> None:
    """As a newcomer reads it, who has chosen nothing yet."""
    orders = two_orders("Qwen3-8B")
    half, times = "Heads 0\N{EN DASH}3:", "36 \N{MULTIPLICATION SIGN} 16 = 576 runs"
    outside = f"{half} {times}, for in LBNHC layers and tokens are outside of heads: "
    outside += "every token of every layer has a piece of its own."
    nothing = f"{half} one run, for in BHLNC nothing of a block is outside of heads: "
    nothing += "it lies together."
    cases = {
        "LBNHC": ([orders[0], orders[1]], f"{outside} Other orders: BHLNC 1."),
        "BHLNC": ([orders[1], orders[0]], f"{nothing} Other orders: LBNHC 576."),
        "two heads": ([plan("Qwen3.5-397B-A17B", memory="80GiB")], "Head 0: "),
        "a state": (
            [plan("Mamba2-2.7B", memory="80GiB")],
            "layers are outside of heads: every layer has",
        ),
        "cut up": ([plan("DeepSeek-V4-Pro", memory="80GiB")], ", for each page is cut up inside."),
    }
    for name, ((first, *others), told) in cases.items():
        show(browser, tmp_path, first, others=others)
        assert told in browser.do("return byId('followed').textContent"), name


def test_other_orders_are_counted_for_the_plan_shown_and_knobs_say_what_they_change(
    browser: Browser, tmp_path: Path
) -> None:
    sizes = (("LBNHC", 16), ("BHLNC", 16), ("LBNHC", 32), ("BHLNC", 32), ("BLNHC", 16))
    made = [plan("Qwen3-8B", memory="40GiB", layout=o, block_size=n) for o, n in sizes]
    made.append(plan("Qwen3-8B", memory="40GiB", layout="LBNHC", tp=8))
    show(browser, tmp_path, made[0], others=made[1:])
    turn = "document.querySelector(`#knobs [aria-label=${arguments[0]}] [value='${arguments[1]}']`)"
    followed, note = "return byId('followed').textContent", "return byId('knobs-note').textContent"
    browser.do(turn + ".click()", "block", "32")
    assert browser.do(followed).endswith("Other orders: BHLNC 1, BLNHC 576 (block 16).")
    browser.do(turn + ".click()", "order", "BHLNC")
    assert "Other orders: LBNHC 1,152, BLNHC 576 (block 16)." in browser.do(followed)
    assert browser.do(note) == ""
    browser.do(turn + ".click()", "tp", "8")
    said = "No plan of tp 8 with order BHLNC, block 32 was drawn: this one has order LBNHC, block"
    assert browser.do(note) == f"{said} 16."
    assert "Other orders" not in browser.do(followed)
    # All of a line of the table chooses it.
    browser.do("document.querySelector('#transfer .choice td:last-child').click()")
    assert browser.do("return paint.follow.kind") == "layer"
    assert browser.do("return byId('words').innerText.includes('Words')")
    scrolls = "picture.blur(); picture.dispatchEvent(new WheelEvent('wheel', { deltaY: 120 }));"
    assert browser.do(scrolls + "return view.level") == "block"


def test_packs_are_seen_in_the_order_of_axes_and_rows_of_one_layer_told_apart(
    browser: Browser, tmp_path: Path
) -> None:
    show(browser, tmp_path, plan("Qwen3.5-397B-A17B", memory="80GiB", layout="LBNHC"))
    order = browser.do("return byId('order').innerText.replaceAll('\\n', ' ')")
    assert order.startswith("L 5 packs of layers B ")
    assert "5 \N{MULTIPLICATION SIGN} 3 \N{MULTIPLICATION SIGN} 704 = 10,560 runs" in browser.do(
        "return byId('followed').textContent"
    )
    assert browser.do("return new Set(drawn.labels).size === drawn.labels.length")
    assert "the first padding of block 0 as recurrent holds it" in find(browser, "padding")
    facts = browser.do(FACTS)
    assert "57,344 bytes behind the page" in facts["padding"]
    assert facts["address"] == f"{4_325_376 - 57_344:,}"
    assert browser.complaints() == []


def test_strips_of_groups_say_which_is_shown_and_where_padding_lies(
    browser: Browser, tmp_path: Path
) -> None:
    show(browser, tmp_path, plan("Qwen3.5-397B-A17B", memory="80GiB"))
    strips = "return [...document.querySelectorAll('.group')].map((one) => [one.innerText,"
    strips += " one.getAttribute('aria-pressed')])"
    (attention, shown), (recurrent, other) = browser.do(strips)
    assert (shown, other) == ("true", "false")
    assert "no padding" in attention
    assert "71,680 bytes (1.3%) unused at the block's end" in recurrent
    browser.do("document.querySelectorAll('.group')[1].click()")
    assert [pressed for _, pressed in browser.do(strips)] == ["false", "true"]
    assert "unused by this group" in browser.do("return byId('legend').textContent")


def test_the_keyboard_stays_on_what_it_chose(browser: Browser, tmp_path: Path) -> None:
    first, *others = two_orders("gpt-oss-20b")
    show(browser, tmp_path, first, others=others)
    for chosen in (
        "#knobs button[value=BHLNC]",
        "#colours button[value=layer]",
        "[data-kind=head]",
    ):
        browser.do(
            "const one = document.querySelector(arguments[0]); one.focus(); one.click()", chosen
        )
        still = "return document.activeElement.matches(arguments[0])"
        assert browser.do(still + " && document.activeElement.ariaPressed === 'true'", chosen), (
            chosen
        )
    browser.do("picture.focus()")
    before = browser.do("return picture.toDataURL()")
    arrow = "new KeyboardEvent('keydown', { key: 'ArrowDown' })"
    browser.do(f"picture.dispatchEvent({arrow})")
    assert browser.do("return byId('cursor').getBoundingClientRect().height > 5")
    assert browser.do("return picture.toDataURL()") == before, "the whole picture is painted anew"


def test_pictures_painted_in_several_frames_are_whole_and_words_follow(
    browser: Browser, tmp_path: Path
) -> None:
    made = [plan("Llama-3.1-405B", memory="80GiB", layout=order) for order in ("LBNHC", "BHLNC")]
    act = "paint.chosen = 'layer'; followKind('token', firstPoint());"
    try:
        show(browser, tmp_path, made[0], others=made[1:])
        browser.do(act)
        looks = "return [picture.toDataURL(), document.body.innerText, byId('stage').style.height]"
        at_once = browser.do(looks)
        browser.prefer(prefers_reduced_motion="no-preference")
        show(browser, tmp_path, made[0], others=made[1:])
        assert browser.do(act + "return wordsDue")
        rest = "const wait = () => painting || wordsDue ? setTimeout(wait, 20) : done(); wait();"
        browser.wait_for("const [done] = arguments;" + rest)
        assert browser.do(looks) == at_once
    finally:
        browser.prefer(prefers_reduced_motion="reduce")


def test_heads_that_share_a_pixel_are_coloured_by_token(browser: Browser, tmp_path: Path) -> None:
    made = plan("Qwen3.5-397B-A17B", memory="80GiB")
    try:
        for width, mode in ((1280, "head"), (400, "token")):
            browser.resize(width, 900)
            show(browser, tmp_path, made)
            assert browser.do("return paint.mode") == mode
    finally:
        browser.resize(1280, 900)

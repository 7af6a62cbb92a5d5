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


def test_the_panel_of_a_picture_of_few_rows_ends_with_its_words(
    browser: Browser, tmp_path: Path
) -> None:
    show(browser, tmp_path, plan("Qwen3-8B", memory="80GiB"))
    browser.do("go({ level: 'page', region: plan().regions[0], index: 0 })")
    browser.do("goIn(firstPoint())")
    below = "const [panel, words] = ['figure', 'figcaption'].map((one) =>"
    below += " document.querySelector(one).getBoundingClientRect().bottom); return panel - words"
    assert browser.do("return view.level") == "cell"
    assert browser.do(below) < 30


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
        assert ("A sample: 159 of 10,000 rows, every 63rd." in said) == (order == "LBNHC")
        browser.do("go({ level: 'pool' })")
        assert "of 1,000,000; the others have the same layout" in browser.do(
            "return byId('caption').textContent"
        )
        browser.do("byId('query').value = 'layers.9999'; byId('search').requestSubmit()")
        assert "9999" in browser.do("return byId('followed').textContent")
    assert browser.complaints() == []


def test_what_is_in_a_hidden_frame_is_drawn_once_it_is_shown(
    browser: Browser, tmp_path: Path
) -> None:
    page = kvatlas.map(plan("gpt-oss-20b", memory="4GiB")).save(tmp_path / "map.html")
    outer = tmp_path / "outer.html"
    outer.write_text(f'<iframe src="{page.name}" width="900" height="700" style="display:none">')
    browser.open(outer, page)
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
        frames = "const [done] = arguments, next = requestAnimationFrame;"
        seen = "const wait = () => inMotion || painting || wordsDue ? next(wait)"
        seen += " : next(() => next(() => done(picture.toDataURL()))); wait()"
        assert browser.wait_for(frames + "change({ plan: 1 });" + seen) == still
        lower = "return picture.getBoundingClientRect().height - drawn.place.total"
        assert abs(browser.do(lower)) < 1, "the panel is as high as another plan's picture"
        show(browser, tmp_path, first, others=others)
        next_click = "change({ plan: 1 }); paint.chosen = 'layer'; update();"
        assert browser.wait_for(frames + next_click + seen) == coloured
    finally:
        browser.prefer(prefers_reduced_motion="reduce")


def test_the_canvas_keeps_its_size_and_a_motion_begins_with_the_picture_as_it_was(
    browser: Browser, tmp_path: Path
) -> None:
    """Of another size, the browser paints all of the page anew; so it does for a motion's frame."""
    first, *others = two_orders("Qwen3-8B")
    show(browser, tmp_path, first, others=others)
    sizes = browser.do(
        """
        const sizes = [], seen = () => sizes.push(`${picture.width} x ${picture.height}`);
        for (const plan of [0, 1]) {
          change({ plan });
          for (const level of ["memory", "pool", "block"]) { go({ level }); seen(); }
          while (view.level !== "cell") { goIn(firstPoint()); seen(); }
        }
        return sizes;
        """
    )
    assert len(sizes) == 10
    assert len(set(sizes)) == 1
    try:
        browser.prefer(prefers_reduced_motion="no-preference")
        show(browser, tmp_path, first, others=others)
        stays = "const before = picture.toDataURL(); change({ plan: 1 });"
        assert browser.do(stays + "return inMotion && picture.toDataURL() === before")
    finally:
        browser.prefer(prefers_reduced_motion="reduce")


def test_a_knob_moves_nothing_around_the_picture(browser: Browser, tmp_path: Path) -> None:
    """What moves is painted anew, be it by 1/64 of a pixel: all of the page then."""
    options = [("LBNHC", 16), ("BHLNC", 16), ("LBNHC", 32)]
    made = [plan("Qwen3-8B", memory="40GiB", layout=one, block_size=n) for one, n in options]
    tops = "['crumbs', 'stage', 'transfer'].map((one) => byId(one).getBoundingClientRect().top)"
    turned = f"change({{ plan: arguments[0] }}); return [byId('knobs-note').textContent, {tops}]"
    try:
        browser.prefer(prefers_reduced_motion="no-preference")
        for width in (400, 1280, 1920, 2560, 3840):
            browser.resize(width, 900)
            show(browser, tmp_path, made[0], others=made[1:])
            plain, grey = (browser.do("stopMotion();" + turned, number) for number in (0, 1))
            assert (plain[0], grey[0][:5], plain[1]) == ("", "Grey:", grey[1]), width
    finally:
        browser.resize(1280, 900)
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
    outside = f"{half} {times} because in LBNHC layers and tokens are outside of heads: "
    outside += "every token of every layer has a separate piece."
    nothing = f"{half} one run because in BHLNC no axis of a block is outside of heads, "
    nothing += "so it is contiguous."
    cases = {
        "LBNHC": ([orders[0], orders[1]], f"{outside} Runs in other orders: BHLNC 1."),
        "BHLNC": ([orders[1], orders[0]], f"{nothing} Runs in other orders: LBNHC 576."),
        "two heads": ([plan("Qwen3.5-397B-A17B", memory="80GiB")], "Head 0: "),
        "a state": (
            [plan("Mamba2-2.7B", memory="80GiB")],
            "layers are outside of heads: every layer has",
        ),
        "cut up": (
            [plan("DeepSeek-V4-Pro", memory="80GiB")],
            " because each page is divided by padding.",
        ),
    }
    for name, ((first, *others), told) in cases.items():
        show(browser, tmp_path, first, others=others)
        said = browser.do("return byId('followed').textContent")
        assert told in said.replace("\N{NO-BREAK SPACE}", " "), name


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
        looks = "return [picture.toDataURL(), document.body.innerText, picture.style.height]"
        at_once = browser.do(looks)
        browser.prefer(prefers_reduced_motion="no-preference")
        show(browser, tmp_path, made[0], others=made[1:])
        assert browser.do(act + "return wordsDue")
        rest = "const wait = () => painting || wordsDue ? setTimeout(wait, 20) : done(); wait();"
        browser.wait_for("const [done] = arguments;" + rest)
        assert browser.do(looks) == at_once
    finally:
        browser.prefer(prefers_reduced_motion="reduce")


def test_rows_that_differ_in_their_layer_alone_are_looked_up_once(
    browser: Browser, tmp_path: Path
) -> None:
    show(browser, tmp_path, plan("Llama-3.1-405B", memory="80GiB", layout="LBNHC"))
    lookups = browser.do(
        """
        const lookUp = window.divide;
        let lookups = 0;
        window.divide = (...given) => { lookups++; return lookUp(...given); };
        paint.chosen = "layer";
        showPicture();
        window.divide = lookUp;
        return lookups;
        """
    )
    assert lookups < 5000


def test_a_row_that_is_not_cut_anew_looks_as_if_it_were(browser: Browser, tmp_path: Path) -> None:
    changes = {
        "coloured by layer": "paint.chosen = 'layer'; update()",
        "a token, too": "followKind('token', firstPoint())",
        "a layer, by layer": "followKind('layer', firstPoint())",
        "a layer": "paint.chosen = ''; update()",
        "a pool": "paint.chosen = 'layer'; go({ level: 'pool' })",
    }
    anew = """
    const brushNow = window.brushOf, known = { has: () => false, get: () => null, set: () => {} };
    window.brushOf = (...given) => ({ ...brushNow(...given), cuts: known });
    const shared = picture.toDataURL();
    showPicture();
    window.brushOf = brushNow;
    return shared === picture.toDataURL();
    """
    for model in ("DeepSeek-V4-Pro", "Qwen3.5-397B-A17B", "Nemotron-H-8B"):
        show(browser, tmp_path, plan(model, memory="80GiB"))
        for group in {0, browser.do("return plan().groups.length - 1")}:
            browser.do("change({ group: arguments[0] }); go({ level: 'block' })", group)
            for name, change in changes.items():
                browser.do(change)
                assert browser.do(anew), (model, group, name)


def test_a_row_that_ends_with_padding_is_not_named_after_its_first_token(
    browser: Browser, tmp_path: Path
) -> None:
    show(browser, tmp_path, plan("DeepSeek-V4-Pro", memory="80GiB"))
    labels = browser.do("return drawn.labels.filter((one) => one !== 'unused')")
    assert labels[:2] == ["layer 0 swa_cache", "layer 2 swa_cache"]
    browser.do("goIn(firstPoint())")
    assert "token 0" not in browser.do("return drawn.labels.slice(-2)")


def test_strips_of_groups_are_kept_for_the_next_plan(browser: Browser, tmp_path: Path) -> None:
    first, other = two_orders("gpt-oss-20b")
    show(browser, tmp_path, first, others=[other])
    strips = "[...document.querySelectorAll('.group canvas')]"
    kept = f"const before = {strips}; change({{ plan: 1 }}); const after = {strips};"
    same = "return before.length && before.every((one, n) => one === after[n])"
    assert browser.do(kept + same), "new canvases take time"
    painted = f"return {strips}.map((one) => one.toDataURL())"
    by_order = browser.do(painted)
    browser.open(kvatlas.map(other).save(tmp_path / "other.html"))
    assert browser.do(painted) == by_order


def test_heads_that_share_a_pixel_are_coloured_by_token(browser: Browser, tmp_path: Path) -> None:
    made = plan("Qwen3.5-397B-A17B", memory="80GiB")
    try:
        for width, mode in ((3840, "head"), (1280, "token")):
            browser.resize(width, 900)
            show(browser, tmp_path, made)
            assert browser.do("return paint.mode") == mode
            assert browser.do("go({ level: 'pool' }); return paint.mode") == "token"
    finally:
        browser.resize(1280, 900)

"""How large pages are and how soon they answer: every model of the catalogue, in a browser.

    python -m tests.page.figures [MODEL | large-LBNHC | large-BHLNC | route ...]

First drawing is from opening the file to the first paint. An answer is from the press of a key,
real input, to the moment when the first frame behind it is seen: what the browser itself reports
as an event's duration, in steps of 8 ms, with rasters and all. Each is asked of a page at rest,
with what is asked in sight, as a reader has it. That frame has the picture, or its first rows; a
motion begins with the picture as it was, so there it has the controls. `whole` is when all rows
and words were painted, too, or what moves for the first time, and stands for an answer that the
browser tells nothing of. Beside them is the time that the page's own thread had a core, which a
busy machine changes little. Ends with 1 where a limit is missed, or a page is too large,
complains, or asks for anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import kvatlas
from kvatlas.models import catalogue
from kvatlas.planning import plan
from tests.page.browser import Browser, chromium
from tests.page.gallery import SIZES, make_page
from tests.page.large_plan import large_plan

LARGEST = 1_000_000
FIRST_DRAWING, ANSWER_WITHIN = 1000, 100
"""Milliseconds."""
SHORTEST = 16
"""Milliseconds; browsers tell of no shorter answers."""
FIRST_PAINT = """
const [done] = arguments;
const wait = () => {
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  if (paint) done(paint.startTime); else setTimeout(wait, 10);
};
wait();
"""
REST = """
const [place, done] = arguments;
stopMotion();
byId(place).scrollIntoView();
requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 60)));
"""
ARM = """
const act = new Function(arguments[0]), armed = performance.now();
window.answered = window.whole = null;
if (window.watch) watch.disconnect(); // what was asked before shall not answer for this
addEventListener("keydown", (event) => {
  act();
  const wait = () => requestAnimationFrame(() => {
    if (painting || wordsDue || (inMotion && !motion)) { wait(); return; }
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => { whole = performance.now() - event.timeStamp; };
    port2.postMessage(0);
  });
  wait();
}, { once: true });
window.watch = new PerformanceObserver((list) => {
  const answer = list.getEntries().find((one) => one.name === "keydown" && one.startTime >= armed);
  if (answer) answered = answer.duration;
});
watch.observe({ type: "event", durationThreshold: 16 });
"""
ANSWERED = """
const [done] = arguments;
let until = Infinity;
const wait = () => {
  if (whole !== null) until = Math.min(until, performance.now() + 500);
  const late = performance.now() > until;
  if (whole !== null && (late || answered !== null)) done([answered, whole]);
  else setTimeout(wait, 5);
};
wait();
"""
ACTIONS = {
    "another plan": "change({ plan: data.plans.length - 1 })",
    "another group": "change({ group: plan().groups.length - 1 })",
    "a colour": "paint.chosen = 'layer'; update()",
    "a token": "followKind('token', firstPoint())",
    "half the heads": "followKind('heads', firstPoint())",
    "out": "go({ level: 'pool' })",
    "in": "goIn(find(plan(), view.stage, view.group, drawn.rows[0].start))",
    "further in": "goIn(firstPoint())",
    "a hover": "const b = picture.getBoundingClientRect(); picture.dispatchEvent("
    "new MouseEvent('mousemove', { clientX: b.left + 300, clientY: b.top + 30 }))",
    "a block": "go({ level: 'block', block: Math.min(1, poolOf(plan(), view).blocks - 1) })",
}
ROUTE_ACTIONS = {
    "all runs": "[...byId('shown').querySelectorAll('button, option')].pop().click()",
    "a band": "const b = byId('bands').getBoundingClientRect(); byId('bands').dispatchEvent("
    "new MouseEvent('mousemove', { clientX: b.left + b.width / 2, clientY: b.top + 200 }))",
    "another pair": "document.querySelectorAll('#pairs tr')[2].click()",
}
PLACES = dict.fromkeys(ACTIONS, "stage") | dict.fromkeys(ROUTE_ACTIONS, "bands")
"""Where an action is seen."""


class Answer(NamedTuple):
    """Milliseconds to the first frame, to the last of a picture and its words, and on a core."""

    wall: float
    whole: float
    core: float
    name: str
    told: bool
    """Whether the browser told of the first frame."""


def measure(browser: Browser, page: Path) -> tuple[float, list[Answer]]:
    """First drawing in milliseconds, and what everything that a reader does took."""
    browser.command("Performance.enable", timeDomain="threadTicks")
    browser.open(page)
    first = browser.wait_for(FIRST_PAINT)
    route = browser.do("return Boolean(data.route)")
    answers = []
    before = core_time(browser)
    for name, script in (ACTIONS | ROUTE_ACTIONS if route else ACTIONS).items():
        wall, whole = answer_time(browser, PLACES[name], script)
        after = core_time(browser)
        seen = max(SHORTEST, whole) if wall is None else wall
        answers.append(Answer(seen, whole, after - before, name, wall is not None))
        before = after
    return first, answers


def answer_time(browser: Browser, place: str, script: str) -> tuple[float | None, float]:
    """Milliseconds from a key, on whose press a script is run, to its first frame and to all.

    The first is None where the browser tells of none in time, as of those that are very short.
    """
    browser.wait_for(REST, place)
    browser.do(ARM, script)
    key = {"key": "F8", "code": "F8", "windowsVirtualKeyCode": 119}
    for kind in ("rawKeyDown", "keyUp"):
        browser.command("Input.dispatchKeyEvent", type=kind, **key)
    answered, whole = browser.wait_for(ANSWERED)
    return answered, whole


def core_time(browser: Browser) -> float:
    """Milliseconds that tasks of the page's thread had a core, since it was opened."""
    metrics = browser.command("Performance.getMetrics")["metrics"]
    return 1000 * float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def pages(folder: Path, chosen: list[str]) -> Iterator[tuple[str, Path]]:
    """Pages as the command line makes them, two larger than any model's, and a route.

    Of these, where names are given, the ones that are chosen.
    """
    made = {model: partial(make_page, model, folder) for model in catalogue()}
    made |= {f"large-{order}": partial(large_page, order, folder) for order in ("LBNHC", "BHLNC")}
    made["route"] = partial(route_page, folder)
    for name in chosen or made:
        yield name, made.get(name, partial(make_page, name, folder))()


def large_page(order: str, folder: Path) -> Path:
    """Of a million blocks and ten thousand layers."""
    return kvatlas.map(large_plan(order)).save(folder / f"large-{order}.html")


def route_page(folder: Path) -> Path:
    """Of a route of many runs."""
    src = plan("Qwen3-8B", memory="40GiB", tp=2, layout="LBNHC")
    dst = plan("Qwen3-8B", memory="40GiB", tp=4, layout="BHLNC")
    return kvatlas.map(src, dst).save(folder / "route.html")


def main() -> int:
    """Print a line for each page and width, then what misses."""
    failed, missed, later, untold = False, [], 0, 0
    heads = f"{'first ms':>9} {'slowest ms':>11} {'whole':>6} {'on a core':>10}"
    with TemporaryDirectory() as folder, chromium() as browser:
        browser.prefer(prefers_reduced_motion="no-preference")
        # All are made before the first is measured: making them takes a core.
        made = list(pages(Path(folder), sys.argv[1:]))
        print(f"{f'{len(made)} pages':>36} {'KB':>5} {'width':>6} {heads}", flush=True)
        for name, page in made:
            nbytes = page.stat().st_size
            for width, height in SIZES.items():
                browser.resize(width, height)
                first, answers = measure(browser, page)
                wall, _, core, what, _ = max(answers)
                untold += sum(not one.told for one in answers)
                whole = max(one.whole for one in answers)
                later += sum(one.whole > ANSWER_WITHIN for one in answers)
                times = f"{first:9.0f} {wall:11.0f} {whole:6.0f} {core:10.0f}  {what}"
                print(f"{name:>36} {nbytes / 1000:5.0f} {width:6} {times}", flush=True)
                if first > FIRST_DRAWING:
                    missed.append(f"{name} at {width} px: first drawing {first:.0f} ms")
                late = [one for one in answers if one.wall > ANSWER_WITHIN]
                told = "{0.name} {0.wall:.0f} ms, whole {0.whole:.0f}, {0.core:.0f} on a core"
                missed += [f"{name} at {width} px: {told.format(one)}" for one in late]
            complaints = browser.complaints()
            if nbytes > LARGEST or complaints:
                failed = True
                print(f"{name}: {nbytes:,} bytes, {complaints}")
    limits = f"first drawing within {FIRST_DRAWING} ms, answers within {ANSWER_WITHIN} ms"
    print("\n".join([f"{len(missed)} misses of {limits}", *missed]))
    print(f"{later} answers were whole later than that")
    print(f"{untold} were not told of by the browser: they count as whole")
    return int(failed or bool(missed))


if __name__ == "__main__":
    sys.exit(main())

"""How large pages are and how soon they answer: every model of the catalogue, in a browser.

    python -m tests.page.figures [MODEL ...]

First drawing is from opening the file to the first paint; an answer is from a click or a move
of the mouse to the paint behind it. Ends with 1 where a page is too large, complains, or asks
for anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import kvatlas
from kvatlas.models import catalogue
from tests.page.browser import Browser, chromium
from tests.page.gallery import make_page
from tests.page.large_plan import large_plan

LARGEST = 1_000_000
FIRST_PAINT = """
const [done] = arguments;
const wait = () => {
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  if (paint) done(paint.startTime); else setTimeout(wait, 10);
};
wait();
"""
ANSWER = """
const done = arguments[1], begin = performance.now();
new Function(arguments[0])();
requestAnimationFrame(() => {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => done(performance.now() - begin);
  port2.postMessage(0);
});
"""
ACTIONS = {
    "another plan": "change({ plan: data.plans.length - 1 })",
    "another group": "change({ group: plan().groups.length - 1 })",
    "a colour": "paint.chosen = 'layer'; update()",
    "a token": "followKind('token', firstPoint())",
    "half the heads": "followKind('heads', firstPoint())",
    "out": "go({ level: 'pool' })",
    "in": "go({ level: 'block' }); goIn(firstPoint())",
    "a hover": "const b = picture.getBoundingClientRect(); picture.dispatchEvent("
    "new MouseEvent('mousemove', { clientX: b.left + 300, clientY: b.top + 30 }))",
    "a block": "go({ level: 'block', block: Math.min(1, poolOf(plan(), view).blocks - 1) })",
}


def measure(browser: Browser, page: Path) -> tuple[float, float, str]:
    """First drawing and the slowest answer in milliseconds, and to what."""
    browser.open(page)
    first = browser.wait_for(FIRST_PAINT)
    answers = {name: browser.wait_for(ANSWER, script) for name, script in ACTIONS.items()}
    slowest = max(answers, key=lambda name: answers[name])
    return first, answers[slowest], slowest


def pages(folder: Path, models: list[str]) -> Iterator[tuple[str, Path]]:
    """Pages as the command line makes them, and two larger than any model's."""
    for model in models or list(catalogue()):
        yield model, make_page(model, folder)
    for order in ("LBNHC", "BHLNC"):
        page = folder / f"{order}.html"
        yield f"10^6 blocks, 4,096 layers, {order}", kvatlas.map(large_plan(order)).save(page)


def main() -> int:
    """Print a line for each page."""
    failed = False
    print(f"{'':>36} {'KB':>6} {'width':>6} {'first ms':>9} {'answer ms':>10}")
    with TemporaryDirectory() as folder, chromium() as browser:
        browser.prefer(prefers_reduced_motion="no-preference")
        for name, page in pages(Path(folder), sys.argv[1:]):
            nbytes = page.stat().st_size
            for width, height in ((1280, 900), (3840, 2160)):
                browser.resize(width, height)
                first, answer, what = measure(browser, page)
                line = f"{nbytes / 1000:6.0f} {width:6} {first:9.0f} {answer:10.0f}  {what}"
                print(f"{name:>36} {line}", flush=True)
            complaints = browser.complaints()
            if nbytes > LARGEST or complaints:
                failed = True
                print(f"{name}: {nbytes:,} bytes, {complaints}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

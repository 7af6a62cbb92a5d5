"""A headless Chromium that shows a map, and says what it was asked for on the way."""

from __future__ import annotations

import json
import shutil
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any


class NoBrowserError(Exception):
    """What is missing of a browser that can be driven."""


class Browser:
    """One window."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._opened: set[str] = set()

    def open(self, page: Path, *inner: Path) -> None:
        """Show a page, which has no other file than `inner` ones."""
        self._opened |= {one.as_uri() for one in (page, *inner)}
        self.driver.get(page.as_uri())

    def do(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def wait_for(self, script: str, *args: Any) -> Any:
        """What a script gives to the function that it gets as its last argument."""
        return self.driver.execute_async_script(script, *args)

    def command(self, name: str, **options: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, options)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, **features: str) -> None:
        """Media features: dark colours, no motion."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.command("Emulation.setEmulatedMedia", features=named)

    def picture(self, width: int) -> bytes:
        """The whole page as PNG."""
        # What lies below the window is painted when there is time: two frames later it was.
        frames = "const [done] = arguments; const next = requestAnimationFrame;"
        self.wait_for(frames + "next(() => next(() => setTimeout(done, 50)))")
        height = self.do("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        beyond = {"captureBeyondViewport": True, "clip": clip}
        return b64decode(self.command("Page.captureScreenshot", **beyond)["data"])

    def printed(self) -> bytes:
        """The page as PDF."""
        return b64decode(self.command("Page.printToPDF", printBackground=True)["data"])

    def point(self, x: float, y: float, kind: str = "mouseMoved") -> None:
        """Move the mouse to a place of the window, or click there."""
        event = {"type": kind, "x": x, "y": y, "button": "none"}
        if kind != "mouseMoved":
            event |= {"button": "left", "clickCount": 1}
        self.command("Input.dispatchMouseEvent", **event)

    def hover(self, x: float, y: float) -> dict[str, str]:
        """Point at a place of the picture; what the page then says, by name."""
        self.do("document.getElementById('facts').replaceChildren()")
        script = (
            "return Object.fromEntries([...document.querySelectorAll('#facts dd')]"
            ".map((one) => [one.dataset.fact, one.textContent]))"
        )
        facts: dict[str, str] = {}
        until = monotonic() + 10
        while not facts:  # a busy browser answers before it has looked where the mouse is
            assert monotonic() < until, f"nothing is said of {x}, {y}"
            self.point(x + 0.5 * (int(monotonic() * 20) % 2), y)
            facts = self.do(script)
        return facts

    def complaints(self) -> list[Any]:
        """What the console said, and requests other than for the pages themselves."""
        said = list(self.driver.get_log("browser"))
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if url not in self._opened and not url.startswith("data:"):
                    said.append(url)
        return said


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, or a NoBrowserError that says what is missing."""
    try:
        webdriver: Any = import_module("selenium.webdriver")
    except ImportError as problem:
        raise NoBrowserError("selenium is not installed") from problem
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        raise NoBrowserError("chromium or chromium-driver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    window = webdriver.Chrome(options=options, service=service)
    try:
        browser = Browser(window)
        browser.resize(1280, 900)
        browser.prefer(prefers_reduced_motion="reduce")
        yield browser
    finally:
        window.quit()

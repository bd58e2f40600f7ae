"""The playground in a real browser, driven over its DevTools pipe. With LOOPLM_SCREENSHOTS=DIR it leaves pictures."""

import base64
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PLACE_FILES = """
import fcntl, os, sys
there, back = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3])
os.dup2(there, 3)
os.dup2(back, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from file 3 and answers on file 4."""


class Browser:
    """One page. Raises AssertionError for whatever goes wrong in it."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(prefix="looplm-browser-", ignore_cleanup_errors=True)
        there, self._write = os.pipe()
        self._read, back = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", "--remote-debugging-pipe", "--no-proxy-server"]
        command = [CHROMIUM, *options, f"--user-data-dir={self._profile.name}", "about:blank"]
        start = [sys.executable, "-c", PLACE_FILES, str(there), str(back), *command]
        self._process = subprocess.Popen(
            start, pass_fds=(there, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(there)
        os.close(back)
        self._buffer, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        self.requested: list[str] = []
        """Addresses that the page has asked for."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._notice(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], 60)[0], "the browser does not answer"
            piece = os.read(self._read, 65536)
            assert piece, "the browser has ended"
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def _notice(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """Goes to an address, and waits until it is there."""
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, a promise's once it is kept."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        """Until a JavaScript expression is true."""
        until = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < until, f"never true: {condition}; {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def key(self, name: str, *, code: int = 0, text: str = "", modifiers: int = 0) -> None:
        """Presses a key, as a keyboard does. modifiers: 2 is Ctrl."""
        common = {"key": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.send("Input.insertText", text=text)

    def point(self, selector: str) -> None:
        """Moves the mouse over an element."""
        x, y = self._centre(f"document.querySelector({json.dumps(selector)})")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def touch(self, selector: str) -> None:
        """Taps an element with a finger."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        x, y = self._centre(element)
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def _centre(self, element: str) -> list[float]:
        box = f"{element}.getBoundingClientRect()"
        return self.run(f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + b.height / 2] }})()")

    def look(self, width: int, height: int, scheme: str) -> None:
        """The size of the window, and whether it is light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """The whole page, as PNG."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()


# --- The page -------------------------------------------------------------------------------------------------------

SIZES = {"desktop": (1200, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def page(shared_browser: Browser, server: Any) -> Iterator[Browser]:
    """The page, connected. Nothing may go wrong in it, nor anything be asked for elsewhere."""
    shared_browser.errors.clear()
    shared_browser.requested.clear()
    shared_browser.look(*SIZES["desktop"], "light")
    shared_browser.open(server.url)
    shared_browser.wait("panes.length === 1")
    shared_browser.run("$('max-tokens').value = 12")
    yield shared_browser
    assert not shared_browser.errors
    outside = [url for url in shared_browser.requested if not url.startswith((server.url, "data:"))]
    assert not outside
    assert server.idle()


def drag(page: Browser, dial: str, value: float) -> None:
    """Moves a slider."""
    page.run(f"(() => {{ const d = $('{dial}'); d.value = {value}; d.dispatchEvent(new Event('input')) }})()")


def done(page: Browser) -> None:
    page.wait("$('status').textContent.startsWith('Done') && panes.every((pane) => pane.answer.views)")


def loops(page: Browser, pane: str = "A") -> list[int]:
    return page.run(f"[...document.querySelectorAll('#pane-{pane} .token')].map((one) => Number(one.dataset.loop))")


def cells(page: Browser, row: str, pane: str = "A") -> list[str]:
    return page.run(f"['', '-all', '-saved'].map((end) => $('{row}' + end + '-{pane}').textContent)")


def look_everywhere(page: Browser, name: str) -> None:
    """On a desktop and a phone, light and dark: nothing is wider than the window. Leaves pictures where asked to."""
    directory = os.environ.get("LOOPLM_SCREENSHOTS")
    for size, scheme in (("desktop", "light"), ("desktop", "dark"), ("phone", "light"), ("phone", "dark")):
        page.look(*SIZES[size], scheme)
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), size
        if directory:
            page.screenshot(Path(directory) / f"{name}-{size}-{scheme}.png")


def test_a_prompt_is_typed_and_a_slider_moved(page: Browser, server: Any) -> None:
    page.run("$('prompt').focus(); $('prompt').select()")
    page.type("class Reader(")
    page.key("Enter", code=13, modifiers=2)
    done(page)
    usual, spoken = loops(page), cells(page, "depth")
    assert len(usual) == 12 and len(set(usual)) > 1
    assert spoken[0] == f"{sum(usual) / 12:.2f}" and spoken[1] == "4.00"
    assert cells(page, "passes")[:2] == [str(sum(usual[1:])), "44"]
    text = page.run("$('text-A').textContent")
    assert text.startswith("class Reader(")
    before = page.run("Number($('server-tokens').textContent.replace(',', ''))")

    drag(page, "threshold-A", 0.0)
    assert page.run("$('rule-A').value") == "threshold" and page.run("$('threshold-value-A').textContent") == "0.00"
    page.run("$('go').click()")
    done(page)
    assert loops(page) == [1] * 12
    assert cells(page, "depth") == ["1.00", "4.00", "75 %"] and cells(page, "passes") == ["11", "44", "75 %"]
    page.wait(f"Number($('server-tokens').textContent.replace(',', '')) === {before + 12}")
    colours = page.run(
        "[...document.querySelectorAll('.legend span')].map((one) => getComputedStyle(one).backgroundColor)"
    )
    assert len(set(colours)) == 4


def test_each_loops_distribution_by_mouse_and_by_keyboard(page: Browser) -> None:
    page.run("$('go').click()")
    done(page)
    page.point("#pane-A .token:last-child")
    page.wait("document.querySelectorAll('#look tbody tr').length === 4")
    left = page.run(
        "[...document.querySelectorAll('#look tbody tr')].findIndex((row) => row.className === 'left') + 1"
    )
    assert left == loops(page)[-1]
    # Greedy: at its own loop a token is the likeliest.
    token = page.run("JSON.stringify(panes[0].answer.tokens.at(-1)).slice(1, -1)")
    assert page.run("document.querySelector('#look .left .bar').textContent").startswith(token)
    page.run("$('text-A').focus()")
    page.key("Home", code=36)
    first = page.run("$('look').textContent")
    page.key("ArrowRight", code=39)
    assert page.run("$('look').textContent") != first
    assert page.run("$('text-A').getAttribute('aria-activedescendant')") == "token-A-1-1"
    page.run("$('numbers').click()")
    look_everywhere(page, "loops")


def test_by_keyboard_alone(page: Browser) -> None:
    """From the prompt to the answer and its tokens: Tab reaches every control, in the order of the page."""
    page.run("$('prompt').focus()")
    reached = ["prompt"]
    while reached[-1] != "text-A":
        page.key("Tab", code=9)
        reached.append(page.run("document.activeElement.id || document.activeElement.textContent"))
        assert len(reached) < 20, reached
        if reached[-1] == "loops-A":
            for _ in range(3):
                page.key("ArrowLeft", code=37)
    assert reached == [
        *("prompt", "max-tokens", "temperature", "seed", "draft", "go", "API key"),
        *("rule-A", "threshold-A", "loops-A", "text-A"),
    ]
    assert page.run("$('rule-A').value") == "loops" and page.run("$('loops-A').value") == "1"
    page.run("$('go').focus()")
    page.key("Enter", code=13, text="\r")
    assert page.run("document.activeElement.id") in ("stop", "go")  # the one that is of use
    done(page)
    assert loops(page) == [1] * 12
    assert page.run("document.activeElement.id") == "go"
    assert page.run("getComputedStyle($('go')).outlineStyle") == "solid"


def test_a_finger_on_a_phone(page: Browser) -> None:
    page.look(*SIZES["phone"], "light")
    page.send("Emulation.setTouchEmulationEnabled", enabled=True)
    page.touch("#go")
    done(page)
    page.touch("#pane-A .token:nth-child(4)")
    page.wait("document.querySelectorAll('#look tbody tr').length === 4")
    assert page.run("document.querySelector('#pane-A .token:nth-child(4)').getAttribute('aria-selected')") == "true"
    small = page.run(
        "[...document.querySelectorAll('button')].filter((b) => b.offsetHeight && b.offsetHeight < 44).length"
    )
    assert small == 0
    page.send("Emulation.setTouchEmulationEnabled", enabled=False)


def test_two_settings_side_by_side(page: Browser) -> None:
    page.run("$('compare').click()")
    drag(page, "loops-A", 4)
    drag(page, "loops-B", 1)
    page.run("$('go').click()")
    done(page)
    assert loops(page, "A") == [4] * 12 and loops(page, "B") == [1] * 12
    assert cells(page, "passes", "B") == ["11", "44", "75 %"]
    told = page.run("$('status').textContent")
    assert "They part after" in told or "the same" in told
    look_everywhere(page, "compare")


def test_chat_goes_on_with_what_was_said(page: Browser) -> None:
    page.run("$('chat').click()")
    for message in ("Open a file", "And close it"):
        page.run(f"$('prompt').value = '{message}'; $('go').click()")
        done(page)
    assert [one["role"] for one in page.run("panes[0].messages")] == ["user", "assistant"] * 2
    assert page.run("panes[0].answers.length") == 2
    prompt = page.run("panes[0].answer.final.prompt_token_ids.length")
    assert prompt > page.run("panes[0].answers[0].final.prompt_token_ids.length") + 12


def test_what_goes_wrong_is_said_and_a_text_can_be_stopped(page: Browser, server: Any) -> None:
    page.run("$('max-tokens').value = 99999; $('go').click()")
    page.wait("$('status').classList.contains('error')")
    assert "2048 positions" in page.run("$('status').textContent")
    page.errors[:] = [error for error in page.errors if "400" not in error]  # the browser notes the refusal
    page.run("$('max-tokens').value = 1500; $('go').click()")
    page.wait("panes[0].answer.tokens.length > 3")
    page.run("$('stop').click()")
    page.wait("$('status').textContent === 'Stopped.'")
    assert server.idle(5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(scheme: str) -> None:
    """WCAG AA, 4.5 to 1, for text on everything it stands on; the ends of the scale of depths among them."""
    page = files("looplm.serving").joinpath("page.html").read_text("utf-8")
    blocks = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", blocks[0 if scheme == "light" else 1]))

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pairs = [("ink", ground) for ground in ("page", "card", "shallow", "deep")]
    pairs += [("soft", "page"), ("soft", "card"), ("accent", "card"), ("accent-ink", "accent"), ("bad", "card")]
    for ink, ground in pairs:
        light, dark = sorted((luminance(colours[ink]), luminance(colours[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)

"""The playground in a real browser. With LOOPLM_SCREENSHOTS=DIR it leaves pictures."""

import os
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from looplm.serving.limits import Limits

from .browser import CHROMIUM, Browser

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


def test_a_refused_message_is_no_part_of_the_chat(page: Browser) -> None:
    page.run("$('chat').click(); $('compare').click()")
    page.run("$('prompt').value = 'Open a file'; $('go').click()")
    done(page)
    before = page.run("panes.map((pane) => [pane.messages.length, pane.at.text.textContent])")
    # One of two panes is refused: the turn is gone from both.
    page.run("panes[1].depth = () => ({ num_loops: 99 }); $('prompt').value = 'hello'; $('go').click()")
    page.wait("running === null")
    assert "at most 8" in page.run("$('status').textContent")
    assert page.run("panes.map((pane) => [pane.messages.length, pane.at.text.textContent])") == before
    page.errors[:] = [error for error in page.errors if "400" not in error]
    page.run("delete panes[1].depth; $('go').click()")
    done(page)
    for pane in (0, 1):
        messages = page.run(f"panes[{pane}].messages")
        assert [one["role"] for one in messages] == ["user", "assistant"] * 2 and messages[2]["content"] == "hello"


def test_while_a_text_is_written_nothing_takes_its_place(page: Browser, server: Any) -> None:
    page.run("$('chat').click(); $('max-tokens').value = 1500; $('prompt').focus()")
    page.type("Open a file")
    page.run("$('fresh').focus()")
    page.key("Enter", code=13, text="\r")  # an empty chat is begun anew
    page.run("$('go').click()")
    page.wait("panes[0].answer.tokens.length > 3")
    for control in ("$('compare')", "$('fresh')", "$('go')", "document.querySelector('[value=text]')"):
        page.run(f"{control}.click()")
        assert page.run(f"{control}.disabled"), control
    page.run("$('numbers').click()")
    assert page.run("panes.length === 1 && running !== null && $('chat').checked")
    assert page.run("document.activeElement.id") == "stop"  # what had the focus cannot be used now
    page.run("$('stop').click()")
    page.wait("$('status').textContent === 'Stopped.'")
    assert [one["role"] for one in page.run("panes[0].messages")] == ["user", "assistant"]
    assert page.run("document.activeElement.id") == "go"
    page.run("$('fresh').click()")
    assert page.run("panes[0].messages.length + panes[0].at.text.childNodes.length") == 0
    page.run("document.querySelector('[value=text]').click(); $('compare').click()")
    assert page.run("panes.length") == 2
    assert server.idle(5)


def test_a_token_that_is_gone_is_looked_at_no_more(page: Browser) -> None:
    page.run("$('compare').click(); $('go').click()")
    done(page)
    page.point("#pane-B .token:last-child")
    page.wait("document.querySelectorAll('#look tbody tr').length === 4")
    page.run("panes[0].clear()")
    assert page.run("$('look').childNodes.length") == 1  # it is of the other text
    page.run("$('compare').click()")
    assert page.run("$('look').childNodes.length") == 0
    page.run("$('go').click()")
    done(page)
    page.point("#pane-A .token:last-child")
    page.wait("document.querySelectorAll('#look tbody tr').length === 4")
    page.run("$('chat').click()")
    assert page.run("$('look').childNodes.length") == 0


def test_counts_are_the_servers_with_drafts_too(page: Browser, serve: Any) -> None:
    page.open(serve().url)
    page.wait("panes.length === 1")
    page.run("$('max-tokens').value = 40; $('draft').value = '1'; $('go').click()")
    done(page)
    page.wait("$('server-tokens').textContent === '40'")
    assert page.run("panes[0].answer.final.rejected_token_loops") > 0
    for row, total in (("work", "loops"), ("passes", "passes")):
        assert cells(page, row) == page.run(
            f"['', '-all', '-saved'].map((end) => $('server-{total}' + end).textContent)"
        )
    # A pane that goes no deeper than drafts do has none.
    page.run("$('draft').value = '2'")
    drag(page, "loops-A", 2)
    page.run("$('go').click()")
    done(page)
    assert loops(page) == [2] * 40
    page.requested.clear()  # of a server of its own


def test_every_loop_has_its_colour(page: Browser) -> None:
    drag(page, "loops-A", 8)
    page.run("$('go').click()")
    done(page)
    spans = "[...document.querySelectorAll('.legend span')]"
    colours = page.run(f"{spans}.map((one) => getComputedStyle(one).backgroundColor)")
    assert len(colours) == len(set(colours)) == 8
    page.run("$('text-A').focus()")
    page.key("Home", code=36)
    page.wait("document.querySelectorAll('#look tbody tr').length === 8")
    assert page.run("getComputedStyle(document.querySelector('#look .left')).backgroundColor") == colours[7]
    look_everywhere(page, "eight")


def test_a_key_may_have_any_letters(page: Browser, serve: Any) -> None:
    page.open(serve(Limits(api_key="ä日")).url)
    page.wait("$('status').textContent.includes('API key')")
    page.run("$('key').value = 'ä日'; $('key').dispatchEvent(new Event('change'))")
    page.wait("panes.length === 1")
    page.errors[:] = [error for error in page.errors if "401" not in error]
    page.requested.clear()  # of a server of its own


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

    pairs = [("ink", ground) for ground in ("page", "card", "shallow", "deep", "beyond")]
    pairs += [("soft", "page"), ("soft", "card"), ("accent", "card"), ("accent-ink", "accent"), ("bad", "card")]
    for ink, ground in pairs:
        light, dark = sorted((luminance(colours[ink]), luminance(colours[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)

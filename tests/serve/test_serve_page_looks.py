"""Looks and accessibility of the page of `hotsplit serve`: colours, a phone's width, axe-core,
screenshots.

`PYTHONPATH=tests python tests/serve/test_serve_page_looks.py docs/images ADDRESS` takes the
screenshots for the docs, from a server at ADDRESS. For axe-core, run `npm pack axe-core` and unpack
the package in build/axe."""

import re
import sys
import tempfile
from pathlib import Path

import pytest
from chromium import Browser
from page_actions import MARKDOWN, act, say, settled
from paths import ROOT
from scripted_server import PAGE, Script, ScriptedServer

pytest_plugins = ("page_fixtures",)

AXE = ROOT / "build" / "axe" / "package" / "axe.min.js"


def test_colours_follow_the_system_until_they_are_switched(browser, serve):
    serve()
    dark = "document.documentElement.hasAttribute('data-dark')"
    assert browser.run(dark) is False
    browser.prefer(prefers_color_scheme="dark")
    browser.until(dark)
    browser.click("#colours")
    assert browser.run(dark) is False
    browser.reload()
    assert browser.run(dark) is False
    browser.click("#colours")
    browser.prefer(prefers_color_scheme="light")
    browser.until(f"!{dark}")


def test_the_page_on_a_phone(browser, serve):
    serve(
        Hello=Script(
            pieces=["a" * 300 + "\n\n```\n" + "b" * 300 + "\n```\n\n|" + "c" * 200 + "|\n|-|"]
        )
    )
    browser.resize(390, 844, is_phone=True)
    browser.reload()
    say(browser, "Hello")
    settled(browser)
    assert browser.run("document.documentElement.scrollWidth") == 390
    assert browser.run("document.getElementById('scroller').scrollWidth") <= 390
    assert browser.run("document.getElementById('input').getBoundingClientRect().bottom") < 844
    assert browser.run("getComputedStyle(document.getElementById('side')).display") == "none"
    browser.click("#menu")
    assert browser.run("document.getElementById('main').inert") is True
    browser.press("Escape")
    assert browser.run("document.activeElement.id") == "menu"
    browser.click("#menu")
    browser.click("#talks a")
    assert browser.run("document.body.dataset.side") == "closed"


def audit(browser: Browser, where: str) -> list[str]:
    found = browser.run(
        "axe.run(document, {resultTypes: ['violations']}).then(result => result.violations.map("
        "v => [v.id, v.impact, v.nodes.map(n => n.target.join(' ')).slice(0, 3)]))"
    )
    return [f"{where}: {one}" for one in found]


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core under build/axe (npm pack axe-core)")
def test_axe_finds_no_faults(browser, serve):
    serve(Show=Script(pieces=[MARKDOWN]), Bad=Script(status=500, error="broken"))
    axe, found = AXE.read_text(), []
    for colours in ("light", "dark"):
        browser.prefer(prefers_color_scheme=colours)
        browser.run("history.replaceState(null, '', '/')")
        browser.reload()
        browser.run(axe + ";0")
        found += audit(browser, f"{colours}, empty")
        for text in ("Show", "Bad"):
            say(browser, text)
            settled(browser)
        found += audit(browser, f"{colours}, talk")
        if colours == "dark":
            break
        act(browser, "Edit message")
        found += audit(browser, f"{colours}, edit")
        act(browser, "Delete \u201cShow\u201d")
        browser.click("#open-settings")
        found += audit(browser, f"{colours}, settings")
        browser.press("Escape")
    browser.resize(390, 844, is_phone=True)
    browser.click("#menu")
    found += audit(browser, "phone, list")
    # The audit can fail: it finds a button without a name.
    browser.run("document.getElementById('new').replaceChildren()")
    assert any("button-name" in line for line in audit(browser, "broken"))
    assert not found


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_have_the_contrast_of_wcag_aa():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    schemes = re.findall(r":root(?:\[data-dark\])? \{(.*?)\}", PAGE.read_text(), re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", scheme))
        for text in ("text", "quiet"):
            for page in ("page", "side", "raised", "bubble", "code", "hover"):
                assert contrast(colours[text], colours[page]) >= 4.5, (text, page)
        for text, page in (
            ("accent", "page"),
            ("on-accent", "accent"),
            ("error", "error-page"),
            ("on-accent", "accent-hover"),
        ):
            assert contrast(colours[text], colours[page]) >= 4.5, (text, page)
        assert contrast(colours["line-strong"], colours["raised"]) >= 3


def test_the_page_loads_nothing_from_elsewhere():
    page = PAGE.read_text()
    assert page.count("<script>") == page.count("<style>") == 1
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//", page)
    assert not re.search(r"@import|url\(|innerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    assert not re.search(r"\son\w+=|\sstyle=", page.split("<body")[1])


QUESTIONS = (
    "Write a short Python function that checks whether a number is prime.",
    "What is a language model?",
    "Give me three tips for learning to cook, as a list.",
)


SCRIPTED = (
    "**Two** things:\n\n1. one\n2. two\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n"
    "| 1 | 2 |\n"
)


def take_pictures(folder: Path, browser: Browser, address: str) -> list[Path]:
    """Takes screenshots of the page with a conversation: light, dark and on a phone."""
    browser.open(address)
    browser.prefer(prefers_color_scheme="light")
    browser.resize(1200, 800)
    browser.until("server.model")
    browser.run("settings = {temperature: 0.5, seed: 2, max_tokens: 220}")
    for text in QUESTIONS:
        browser.click("#new")
        say(browser, text)
        browser.until("!running.size && talk.messages.length", seconds=300)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=640, y=5)
    paths = []
    for name, colours, size in (
        ("light", "light", (1200, 800, 1.0, False)),
        ("dark", "dark", (1200, 800, 1.0, False)),
        ("phone", "light", (390, 844, 1.5, True)),
    ):
        browser.prefer(prefers_color_scheme=colours)
        width, height, scale, is_phone = size
        browser.resize(width, height, scale=scale, is_phone=is_phone)
        browser.run("document.getElementById('scroller').scrollTop = 0")
        browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        paths.append(folder / f"serve-{name}.png")
        paths[-1].write_bytes(browser.screenshot())
    return paths


def test_screenshots_are_taken(browser, tmp_path):
    pieces = re.findall(r"\S+\s*", SCRIPTED)
    with ScriptedServer({text: Script(pieces=pieces) for text in QUESTIONS}) as server:
        paths = take_pictures(tmp_path, browser, server.address)
    assert [path.name for path in paths] == ["serve-light.png", "serve-dark.png", "serve-phone.png"]
    assert all(20_000 < path.stat().st_size < 200_000 for path in paths)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as chromium:
        for path in take_pictures(Path(sys.argv[1]), chromium, sys.argv[2]):
            print(path, path.stat().st_size)

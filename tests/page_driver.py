"""What tests of the page of `sparkinfer serve` have in common: fixtures, and what a person does.

Test modules name this one in pytest_plugins for the fixtures. What the model says is scripted
(tests/scripted_server.py)."""

import json

import pytest
from chromium import Browser, found_browser
from scripted_server import Script, ScriptedServer

needs_browser = pytest.mark.skipif(found_browser() is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def serve(browser):
    """Opens the page on a server that plays these scripts, in a browser that kept nothing."""
    opened: list[ScriptedServer] = []

    def open_page(key: str = "", **scripts: Script) -> ScriptedServer:
        server = ScriptedServer(scripts, key=key).__enter__()
        opened.append(server)
        browser.said.clear()
        browser.open(server.address)
        browser.until("server.model" if not key else "!!document.querySelector('#notice button')")
        return server

    browser.resize(1200, 800)
    browser.prefer(prefers_color_scheme="light")
    yield open_page
    for server in opened:
        server.__exit__()
    assert not [line for line in browser.said if "Failed to load resource" not in line]


def say(browser: Browser, text: str) -> None:
    """Types a message and sends it."""
    browser.click("#input")
    browser.type(text)
    browser.press("Enter")


def settled(browser: Browser) -> None:
    browser.until("!running.size && talk.messages.length")


def answer(browser: Browser) -> str:
    return browser.run("[...document.querySelectorAll('.assistant .text')].at(-1).innerText")


def stats(browser: Browser) -> str:
    return browser.run("[...document.querySelectorAll('.assistant .under')].at(-1).innerText")


def act(browser: Browser, label: str) -> None:
    """Clicks the last button that is called so."""
    browser.run(
        f"[...document.querySelectorAll('button[aria-label={json.dumps(label)}]')].at(-1).click()"
    )

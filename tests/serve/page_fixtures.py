"""Fixtures for tests of the page of `hotsplit serve`, which load this module with
pytest_plugins."""

import pytest
from chromium import Browser, found_browser
from scripted_server import Script, ScriptedServer


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if found_browser() is None:
        pytest.skip("no Chromium on this machine")
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def serve(browser):
    """Opens the page on a server that plays these scripts, in a browser without stored data."""
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

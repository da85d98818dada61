"""Fixtures for tests of the page of `hotsplit serve`, which load this module with pytest_plugins;
user actions on the page, and what it shows then."""

import json

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


MARKDOWN = """# Title

Some **bold**, *slanted*, ***both***, ~~gone~~ and `co*d*e`, snake_case_name, 2 * 3 * 4.
Next line, \\*escaped\\*, [link](https://example.org/a_(b)), https://example.org/x_y_z.

1. one
2. two
   - deep **er**
     still deeper

   second paragraph
3. three

- [not a link](nowhere)

> quoted
> twice

```python
if a < b:
    print("**not bold**")
```

| left | right |
|------|------:|
| `a`  | *b*   |

---
Unclosed **bold and `code"""


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
    """Clicks the last button with this name."""
    browser.run(
        f"[...document.querySelectorAll('button[aria-label={json.dumps(label)}]')].at(-1).click()"
    )

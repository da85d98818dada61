"""User actions on the page of `hotsplit serve`, and what it shows then."""

import json

from chromium import Browser

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

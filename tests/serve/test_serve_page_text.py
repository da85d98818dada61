"""What the page of `hotsplit serve` shows: a model's text as markdown, never as HTML; colours, a
phone's width."""

import json
import re

import pytest
from page_actions import MARKDOWN, answer, say, settled
from scripted_server import PAGE, Script

pytest_plugins = ("page_fixtures",)

HOSTILE = [
    "<script>window.attacked = 1</script>\n\n<img src=x onerror='window.attacked = 2'>\n\n",
    "[a](javascript:window.attacked=3) [b](data:text/html,<script>attacked=4</script>)\n\n",
    "![c](https://example.com/seen.png) <b>bold?</b> `<i>code</i>` <javascript:attacked=5>\n\n",
    "```html\n<svg onload='window.attacked = 6'></svg>\n```\n\n",
    "| <u>cell</u> |\n|---|\n| <img src=y onerror='window.attacked=7'> |\n",
]


def test_html_of_a_model_is_shown_as_text(browser, serve):
    serve(Attack=Script(pieces=HOSTILE), **{"<b>me</b>": Script(pieces=["done"])})
    say(browser, "Attack")
    settled(browser)
    shown = answer(browser)
    scripts = ("<script>window.attacked = 1</script>", "[a](javascript:", "<javascript:attacked=5>")
    images = ("onerror='window.attacked = 2'", "<svg onload=")
    for text in (*scripts, *images, "<b>bold?</b>", "<i>code</i>", "<u>cell</u>"):
        assert text in shown, text
    say(browser, "<b>me</b>")
    settled(browser)
    names = browser.run(
        "[...new Set([...document.querySelectorAll('#log *')].map(e => e.tagName))]"
    )
    assert not set(names) & {"SCRIPT", "IMG", "B", "I", "U", "IFRAME"}
    links = browser.run("[...document.querySelectorAll('#log a')].map(a => [a.href, a.rel])")
    assert links == [["https://example.com/seen.png", "noopener noreferrer nofollow"]]
    assert browser.run("window.attacked === undefined && document.scripts.length === 1")
    assert browser.run("document.querySelector('#talks a').innerText") == "Attack"


def test_markdown(browser, serve):
    serve(Show=Script(pieces=re.findall(r"(?s).{1,7}", MARKDOWN)))
    say(browser, "Show")
    settled(browser)

    def texts(selector: str) -> list[str]:
        return browser.run(
            f"[...document.querySelectorAll('.text {selector}')].map(e => e.textContent)"
        )

    assert texts("h3") == ["Title"] and texts("del") == ["gone"]
    assert texts("strong") == ["bold", "both", "er"] and texts("em") == ["slanted", "both", "b"]
    assert texts("p > code") == ["co*d*e"] and texts("blockquote") == [
        "quoted\ntwice".replace("\n", "")
    ]
    assert texts("a") == ["link", "https://example.org/x_y_z"]
    assert texts("ol > li > p")[:2] == ["one", "two"] and "second paragraph" in texts("ol > li > p")
    assert texts("ol ul > li") == ["deep erstill deeper"] and len(texts("ol > li")) == 3
    assert texts("pre") == ['if a < b:\n    print("**not bold**")']
    assert texts("th") == ["left", "right"] and texts("td") == ["a", "b"]
    whole = answer(browser)
    plain = ("snake_case_name", "2 * 3 * 4", "*escaped*", "[not a link](nowhere)")
    for text in (*plain, "Unclosed **bold and `code"):
        assert text in whole, text
    # Rendering piece by piece gives the same as rendering at once.
    grown = browser.run("document.querySelector('.text').innerHTML")
    browser.reload()
    assert browser.run("document.querySelector('.text').innerHTML") == grown


MARKUP = ["*" * 4000, "`" * 3001 + "a", "[" * 4000, "> " * 3000, "- " * 3000, "**a " * 3000]
MARKUP += ["_a" * 4000, "|" * 4000 + "\n" + "|-" * 2000, "`a``b" * 2000, "https://" * 1000]


@pytest.mark.parametrize("text", MARKUP)
def test_text_of_markup_characters_alone_renders_quickly(browser, serve, text):
    serve()
    spent = browser.run(
        f"(() => {{ const at = performance.now(); const box = document.createElement('div');"
        f"redraw(box, {json.dumps(text)}); return performance.now() - at; }})()"
    )
    assert spent < 2000


def test_code_is_copied(browser, serve):
    serve(Show=Script(pieces=["```\na < b\n```"]))
    say(browser, "Show")
    settled(browser)
    browser.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    browser.click(".codeblock button")
    assert browser.until("window.copied") == "a < b"
    assert browser.until("document.querySelector('.codeblock button').innerText === 'Copied'")


def test_reasoning_is_folded(browser, serve):
    serve(Hello=Script(thoughts=["Let me ", "think."], pieces=["Hi."]))
    say(browser, "Hello")
    settled(browser)
    assert browser.run("document.querySelector('.thought').open") is False
    assert browser.run("document.querySelector('.thought .text').textContent") == "Let me think."
    assert answer(browser) == "Hi."


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

"""Rendering of a model's text on the page of `hotsplit serve`: markdown, never HTML."""

import json
import re

import pytest
from page_actions import MARKDOWN, answer, say, settled
from scripted_server import Script

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
    for text in (
        "<script>window.attacked = 1</script>",
        "onerror='window.attacked = 2'",
        "[a](javascript:",
        "<b>bold?</b>",
        "<i>code</i>",
        "<svg onload=",
        "<u>cell</u>",
        "<javascript:attacked=5>",
    ):
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
    for text in (
        "snake_case_name",
        "2 * 3 * 4",
        "*escaped*",
        "Unclosed **bold and `code",
        "[not a link](nowhere)",
    ):
        assert text in whole, text
    # Rendering piece by piece gives the same as rendering at once.
    grown = browser.run("document.querySelector('.text').innerHTML")
    browser.reload()
    assert browser.run("document.querySelector('.text').innerHTML") == grown


@pytest.mark.parametrize(
    "text",
    [
        "*" * 4000,
        "`" * 3001 + "a",
        "[" * 4000,
        "> " * 3000,
        "- " * 3000,
        "**a " * 3000,
        "_a" * 4000,
        "|" * 4000 + "\n" + "|-" * 2000,
        "`a``b" * 2000,
        "https://" * 1000,
    ],
)
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

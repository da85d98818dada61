"""The page of `hotsplit serve`, in a headless Chromium, as a person uses it: a model's text is
shown as markdown, never as HTML.

Answers are scripted (tests/serve/scripted_server.py), except in one test, which uses a real
server."""

import json
import re
import threading
import time

import pytest
from page_actions import MARKDOWN, act, answer, say, settled, stats
from scripted_server import PAGE, Script, page_policy
from serve_client import ServerProcess
from test_chat import chat_model

pytest_plugins = ("page_fixtures",)


def test_an_answer_arrives_word_by_word_and_survives_a_reload(browser, serve):
    wait = threading.Event()
    server = serve(Hello=Script(pieces=["One ", "two ", "three."], wait=wait))
    assert browser.run("document.activeElement.id") == "input"
    assert browser.run("document.getElementById('about').innerText").startswith("SmolLM2-135M")
    say(browser, "Hello")
    browser.until("document.querySelector('.assistant .text')?.innerText === 'One'")
    assert browser.run("document.getElementById('send').ariaLabel") == "Stop (Esc)"
    assert browser.run("document.getElementById('log').ariaBusy") == "true"
    wait.set()
    settled(browser)
    assert answer(browser) == "One two three."
    assert re.fullmatch(
        r"[\d,.]+ tokens/s \S first token \d\.\d\d s \S 3 tokens", stats(browser).strip()
    )
    assert browser.run("document.getElementById('context').innerText") == "34 of 8,192 tokens"
    assert browser.run("document.getElementById('status').innerText") == "The answer is complete."
    sent = server.asked[0]
    assert sent["stream"] is True and sent["model"] == "SmolLM2-135M-Instruct"
    assert sent["messages"] == [{"role": "user", "content": "Hello"}]
    browser.reload()
    assert answer(browser) == "One two three." and "3 tokens" in stats(browser)
    assert browser.run("document.querySelector('#talks a[aria-current]').innerText") == "Hello"


ERRORS = ("console.error(Error('planted'))", "console.assert(false, 'planted')")
THROWN = "setTimeout(() => { throw Error('planted') })"


@pytest.mark.parametrize("script", [*ERRORS, THROWN])
def test_an_error_of_the_page_is_recorded(browser, serve, script):
    serve()
    browser.run("void console.log('planted')")
    assert not browser.said
    browser.run(f"void {script}")
    browser.run("new Promise(done => setTimeout(done, 50))")
    (line,) = browser.said
    assert "planted" in line
    browser.said.clear()


def test_stop_keeps_the_partial_answer_and_disconnects(browser, serve):
    server = serve(Hello=Script(pieces=["Never ", "ends"], wait=threading.Event()))
    for stop in (lambda: browser.press("Escape"), lambda: browser.click("#send")):
        say(browser, "Hello")
        browser.until("[...document.querySelectorAll('.text')].at(-1)?.innerText === 'Never'")
        broken = server.num_broken
        stop()
        settled(browser)
        assert answer(browser) == "Never" and "stopped" in stats(browser)
        deadline = time.monotonic() + 10
        while server.num_broken == broken and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.num_broken == broken + 1


def test_a_reload_in_the_middle_of_an_answer_keeps_its_beginning(browser, serve):
    serve(Hello=Script(pieces=["Begun", "never"], wait=threading.Event()))
    say(browser, "Hello")
    browser.until("document.querySelector('.text')?.innerText === 'Begun'")
    browser.reload()
    assert answer(browser) == "Begun" and "stopped" in stats(browser)


def test_regenerate_and_edit_send_the_earlier_messages(browser, serve):
    server = serve(
        Hello=Script(pieces=["Hi."]), And=Script(pieces=["More."]), Or=Script(pieces=["Less."])
    )
    for text in ("Hello", "And"):
        say(browser, text)
        settled(browser)
    act(browser, "Regenerate answer")
    settled(browser)
    assert server.asked[2]["messages"] == server.asked[1]["messages"]
    browser.press("ArrowUp")
    assert browser.run("document.activeElement.value") == "And"
    browser.press("Escape")
    assert browser.run("document.activeElement.id") == "input" and len(server.asked) == 3
    act(browser, "Edit message")
    browser.run("document.activeElement.select()")
    browser.type("Or")
    browser.press("Enter")
    browser.until("talk.messages.at(-2).content === 'Or'")
    settled(browser)
    assert [m["content"] for m in server.asked[3]["messages"]] == ["Hello", "Hi.", "Or"]
    shown = browser.run("[...document.querySelectorAll('.message .body')].map(b => b.innerText)")
    assert shown == ["Hello", "Hi.", "Or", "Less."]


def test_conversations_are_listed_renamed_deleted_and_restored(browser, serve):
    serve(One=Script(pieces=["1"]), Two=Script(pieces=["2"]))
    for text in ("One", "Two"):
        browser.click("#new")
        say(browser, text)
        settled(browser)
    titles = "[...document.querySelectorAll('#talks a')].map(a => a.innerText)"
    assert browser.run(titles) == ["Two", "One"]
    browser.click("#talks li:nth-child(2) a")
    browser.until("document.querySelector('#title').innerText === 'One'")
    assert answer(browser) == "1"
    act(browser, "Rename \u201cOne\u201d")
    browser.type("<i>Three</i>")
    browser.press("Enter")
    assert browser.run(titles) == ["Two", "<i>Three</i>"]
    act(browser, "Delete \u201c<i>Three</i>\u201d")
    assert browser.run(titles) == ["Two"] and browser.run("talk.messages.length") == 0
    browser.click("#notice button")
    browser.until("document.querySelector('#title').innerText === '<i>Three</i>'")
    assert answer(browser) == "1" and len(browser.run(titles)) == 2
    browser.reload()
    assert answer(browser) == "1"
    browser.run("history.back()")
    browser.until("document.querySelector('#hello').hidden === false")


def test_an_answer_goes_on_while_another_conversation_is_shown(browser, serve):
    wait = threading.Event()
    serve(Slow=Script(pieces=["first ", "last"], wait=wait), Fast=Script(pieces=["at once"]))
    say(browser, "Slow")
    browser.until("document.querySelector('.text')?.innerText === 'first'")
    browser.click("#new")
    say(browser, "Fast")
    browser.until("document.querySelector('.text')?.innerText === 'at once'")
    wait.set()
    settled(browser)
    assert answer(browser) == "at once"
    browser.click("#talks li:nth-child(2) a")
    browser.until("document.querySelector('.text')?.innerText === 'first last'")


def test_errors_are_one_line_and_can_be_tried_again(browser, serve):
    scripts = {
        "Full": Script(status=503, error="the queue is full:\ntry again"),
        "Late": Script(pieces=["half"], error="the model failed"),
        "Cut": Script(pieces=["half"], finish=None),
        "Long": Script(pieces=["much"], finish="length"),
        "Fine": Script(pieces=["good"]),
    }
    server = serve(**scripts)
    told = "document.querySelector('.message:last-child .told span')?.innerText"
    wanted = [
        "the queue is full: try again",
        "the model failed",
        "The connection ended before the answer did.",
    ]
    for text, line in zip(("Full", "Late", "Cut"), wanted, strict=True):
        say(browser, text)
        settled(browser)
        assert browser.run(told) == line
    scripts["Cut"].finish = "stop"
    browser.click(".message:last-child .told button")
    browser.until("!document.querySelector('.message:last-child .told')")
    settled(browser)
    assert answer(browser) == "half"
    say(browser, "Long")
    settled(browser)
    assert "token limit" in stats(browser)
    say(browser, "Fine")
    settled(browser)
    # The question that had no answer is not sent again.
    said = [m["content"] for m in server.asked[-1]["messages"]]
    assert said == ["Late", "half", "Cut", "half", "Long", "much", "Fine"]


def test_a_server_that_stops_is_reported(browser, serve):
    server = serve(Hello=Script(pieces=["Hi."]))
    server.__exit__()
    say(browser, "Hello")
    browser.until("document.querySelector('.told span')?.innerText.includes('cannot be reached')")


def test_a_server_without_its_model_yet_is_not_called_unreachable(browser, serve):
    server = serve()
    server.unready = "the model is being loaded"
    browser.reload()
    browser.until("document.getElementById('notice').innerText.includes('is being loaded')")
    server.unready = ""
    browser.click("#notice button")
    browser.until("server.model")


def test_an_api_key_is_requested_and_sent(browser, serve):
    server = serve(key="secret", Hello=Script(pieces=["Hi."]))
    say(browser, "Hello")
    settled(browser)
    assert "API key" in browser.run("document.querySelector('.told span').innerText")
    browser.click(".told button")
    assert browser.run("document.activeElement.id") == "key"
    browser.type("secret")
    browser.press("Escape")
    browser.until("server.model")
    act(browser, "Settings")
    browser.press("Escape")
    browser.run("[...document.querySelectorAll('.told button')].at(-1).click()")
    browser.until("document.querySelector('.text')?.innerText === 'Hi.'")
    assert len(server.asked) == 1
    browser.run("localStorage.removeItem('hotsplit.key')")


def test_settings_are_sent_and_kept(browser, serve):
    server = serve(Hello=Script(pieces=["Hi."]))
    browser.click("#open-settings")
    typed = {"temperature": "0.5", "top_k": "20", "top_p": "0.9", "min_p": "0.1"}
    typed |= {"max_tokens": "64", "seed": "7"}
    for name, value in {"system": "Be brief.", **typed}.items():
        browser.click(f"#{name}")
        browser.type(value)
    browser.press("Escape")
    browser.reload()
    say(browser, "Hello")
    settled(browser)
    sent = server.asked[0]
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: sent[name] for name in typed} == {k: json.loads(v) for k, v in typed.items()}
    browser.click("#open-settings")
    assert browser.run("document.getElementById('top_k').value") == "20"
    browser.click("#top_p")
    browser.run("document.activeElement.select()")
    browser.type("7")  # above 1, so it is not kept
    browser.press("Escape")
    assert browser.run("settings.top_p") == 0.9
    browser.click("#open-settings")
    browser.click("#reset")
    browser.press("Escape")
    browser.run("document.querySelector('[aria-label=\"Regenerate answer\"]').click()")
    settled(browser)
    assert set(server.asked[1]) == {"messages", "model", "stream", "stream_options"}


def test_enter_sends_and_shift_enter_starts_a_line(browser, serve):
    server = serve(**{"a\nb": Script(pieces=["two lines"])})
    browser.press("Enter")
    browser.type("a")
    browser.press("Enter", shift=True)
    browser.type("b")
    browser.press("Enter")
    settled(browser)
    assert len(server.asked) == 1 and answer(browser) == "two lines"
    assert browser.run("document.querySelector('.user .body').innerText") == "a\nb"


def test_a_full_or_damaged_storage_is_survived(browser, serve):
    serve(Hello=Script(pieces=["Hi."]))
    browser.run("localStorage.setItem('hotsplit.index', '{not json')")
    browser.run("localStorage.setItem('hotsplit.talk.x', '[1]')")
    browser.run("location.hash = 'x'")
    browser.until("document.getElementById('notice').innerText.includes('not in this browser')")
    browser.reload()
    browser.run("Storage.prototype.setItem = () => { throw new Error('full'); }")
    say(browser, "Hello")
    settled(browser)
    assert "storage is full" in browser.run("document.getElementById('notice').innerText")
    assert browser.run("document.querySelector('#talks a').innerText") == "Hello"
    browser.click("#new")
    browser.click("#talks a")
    browser.until("document.querySelector('.text')?.innerText === 'Hi.'")


def test_the_page_with_a_real_server(browser, tmp_path):
    """Typing, streaming, stopping, regenerating and reloading, with nothing scripted."""
    model, options = chat_model(tmp_path / "tiny.gguf", 1024), ("--threads", "1", "--alias", "tiny")
    with ServerProcess(model, tmp_path / "log", *options, key="secret") as server:
        browser.said.clear()
        # The key is the password that a browser asks for and sends with the page's requests.
        browser.open(f"http://user:secret@127.0.0.1:{server.port}/")
        browser.until("server.model === 'tiny'")
        browser.run("settings = {temperature: 0, max_tokens: 12}")
        say(browser, "Hello")
        settled(browser)
        first = browser.run("talk.messages[1]")
        assert first["state"] == "length" and first["stats"]["tokens"] == 12
        assert first["stats"]["total"] > 12 and first["stats"]["perSecond"] > 0
        assert re.search(r"\d tokens/s . first token \d.* 12 tokens . cut off", stats(browser))
        told = browser.run("document.getElementById('status').innerText")
        assert told == "Cut off at the token limit."
        act(browser, "Regenerate answer")
        settled(browser)
        assert browser.run("talk.messages[1].content") == first["content"] != ""
        browser.run("settings = {temperature: 0, max_tokens: 900}")
        say(browser, "Go on")
        browser.until("document.querySelectorAll('.text')[1]?.innerText.length > 3")
        browser.press("Escape")
        settled(browser)
        assert "stopped" in stats(browser)
        whole = browser.run("document.getElementById('log').innerText")
        browser.reload()
        assert browser.run("document.getElementById('log').innerText") == whole
        browser.run("settings = {top_p: 7}")
        say(browser, "Wrong")
        settled(browser)
        assert "top_p" in browser.run("document.querySelector('.told span').innerText")
        policy = browser.run(
            "fetch(address('')).then(r => r.headers.get('content-security-policy'))"
        )
        assert policy == page_policy(PAGE.read_text())
        # The console shows only the refusal, no other error or request that the policy forbids.
        assert not [line for line in browser.said if "status of 400" not in line]


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

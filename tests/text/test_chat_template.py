"""Chat templates: their texts and tokens equal those of transformers, and a hostile one ends in a
one-line error."""

import itertools
import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import pytest
from case_tables import rows_of
from chat_templates import (
    ANSWER,
    CHATML,
    GEMMA,
    LLAMA2,
    MESSAGES,
    QWEN_TOOLS,
    SYSTEM,
    TEMPLATES,
    TOOLS,
    USER,
    ZEPHYR,
)
from checkpoints import random_llama
from jinja2 import TemplateError
from models import byte_level_keys, make_model, make_sizes
from texts import byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hotsplit.artifacts.model_file import TEMPLATE_KEY, TEMPLATES_KEY, ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.convert.tokenizer import tokenizer_keys
from hotsplit.errors import HotsplitError
from hotsplit.runtime.text import worker
from hotsplit.runtime.text.built_in_templates import BUILT_IN
from hotsplit.runtime.text.chat_template import ChatTemplate, chat_template_of, in_turns
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.runtime.text.template_process import TemplateProcess

pytest_plugins = ("text_fixtures",)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# What transformers raises for a template that rejects the messages.
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


@pytest.fixture(scope="module")
def oracle() -> PreTrainedTokenizerFast:
    return fast(byte_level_tokenizer("smollm", 400))


def fast(tokenizer, **more) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "[INST]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL, **more)


def template(text: str, process: TemplateProcess, **more) -> ChatTemplate:
    return ChatTemplate(name="it", text=text, special=SPECIAL, process=process, **more)


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_equal_those_of_transformers(name, process, oracle):
    rendered = refused = 0
    ours = template(TEMPLATES[name], process)
    known = [messages for kind, messages in MESSAGES.items() if kind != "wrong order"]
    for messages, tools, head in itertools.product(known, (None, TOOLS), (True, False)):
        options = {"tools": tools, "add_generation_prompt": head}
        try:
            want = oracle.apply_chat_template(
                messages, chat_template=TEMPLATES[name], tokenize=False, **options
            )
        except REFUSALS as error:
            with pytest.raises(HotsplitError) as refusal:
                ours.render(messages, **options)
            assert str(error)[:60].split("\n")[0] in str(refusal.value)
            refused += 1
            continue
        assert ours.render(messages, **options) == want
        rendered += 1
    assert rendered >= 22, (rendered, refused)


CALL_OF = {"type": "function", "id": "abcdefgh1", "function": {"name": "f", "arguments": {}}}
HELLO = {"role": "user", "content": "Hello."}
# Messages, and what people write in their place for a template that wants turns.
JOINED = {
    "two of the user": ([USER, HELLO], [USER | {"content": f"{USER['content']}\n\nHello."}]),
    "three of the user": ([HELLO] * 3, [HELLO | {"content": "Hello.\n\nHello.\n\nHello."}]),
    "two answers": (
        [HELLO, ANSWER, ANSWER, USER],
        [HELLO, ANSWER | {"content": "\n\n".join([ANSWER["content"]] * 2)}, USER],
    ),
    "an empty one": ([HELLO, ANSWER, ANSWER | {"content": ""}, USER], [HELLO, ANSWER, USER]),
    "two of the system": (
        [SYSTEM, HELLO, ANSWER, HELLO, USER],
        [SYSTEM, HELLO, ANSWER, HELLO | {"content": f"Hello.\n\n{USER['content']}"}],
    ),
}


@pytest.mark.parametrize("kind", JOINED)
@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_of_one_role_in_succession(name, kind, process, oracle):
    """They stay as they are where the template takes them, otherwise as one message."""
    for messages in JOINED[kind]:
        try:
            want = oracle.apply_chat_template(
                messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
            )
        except REFUSALS:
            continue
        assert template(TEMPLATES[name], process).render(JOINED[kind][0]) == want
        return
    with pytest.raises(HotsplitError, match="rejects these messages"):
        template(TEMPLATES[name], process).render(JOINED[kind][0])


def test_what_joined_messages_keep():
    """Calls and thoughts of all; parts of texts; results, which have ids, stay apart."""
    said = [
        {"role": "assistant", "content": "Let me look.", "reasoning_content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL_OF]},
        {"role": "assistant", "content": None, "tool_calls": [CALL_OF], "reasoning_content": "b"},
        {"role": "tool", "content": "1", "tool_call_id": "x"},
        {"role": "tool", "content": "2", "tool_call_id": "y"},
        {"role": "user", "content": "And?"},
        {"role": "user", "content": [{"type": "text", "text": "Well?"}]},
    ]
    answer, *results, question = in_turns(said)
    assert answer["content"] == "Let me look." and answer["tool_calls"] == [CALL_OF, CALL_OF]
    assert answer["reasoning_content"] == "a\n\nb" and results == said[3:5]
    assert question["content"] == [{"type": "text", "text": t} for t in ("And?", "Well?")]
    assert said[0] == {"role": "assistant", "content": "Let me look.", "reasoning_content": "a"}


def test_variables_reach_the_template(process, oracle):
    text = TEMPLATES["qwen-reasoning"]
    for value in (True, False):
        given = {"chat_template": text, "tokenize": False, "add_generation_prompt": True}
        want = oracle.apply_chat_template([USER], **given, enable_thinking=value)
        ours = template(text, process)
        assert ours.render([USER], variables={"enable_thinking": value}) == want
        assert ("</think>" in want) is not value


@pytest.mark.parametrize("name", ["chatml", "llama2", "llama3", "gemma", "phi3", "qwen-tools"])
def test_the_last_message_is_continued_as_in_transformers(name, process, oracle):
    text = TEMPLATES[name]
    for answer in (ANSWER, ANSWER | {"content": "It is"}):
        want = oracle.apply_chat_template(
            [USER, answer], chat_template=text, tokenize=False, continue_final_message=True
        )
        got = template(text, process).render(
            [USER, answer], add_generation_prompt=False, continue_final_message=True
        )
        assert got == want and got.rstrip().endswith(answer["content"].strip())
    for wrong in ([{"role": "user", "content": None}], [{"role": "user", "content": []}]):
        with pytest.raises(HotsplitError, match="no text that could be continued"):
            template(text, process).render(
                wrong, add_generation_prompt=False, continue_final_message=True
            )


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("name", ["chatml", "llama2", "mistral", "zephyr", "qwen-tools"])
def test_tokens_equal_those_of_transformers(kind, name, process):
    """Special tokens in the text become one token each, and encode_rendered adds no begin token."""
    tokenizer = (
        byte_level_tokenizer("smollm", 400) if kind == "bytes" else sentencepiece_tokenizer(400)
    )
    theirs = fast(tokenizer)
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", begin)]
    )
    codec = TextCodec(tokenizer, begin, frozenset())
    compared = 0
    for messages in MESSAGES.values():
        try:
            want = theirs.apply_chat_template(
                messages,
                chat_template=TEMPLATES[name],
                add_generation_prompt=True,
                return_dict=False,
            )
        except REFUSALS:
            continue
        text = template(TEMPLATES[name], process).render(messages)
        assert codec.encode_rendered(text) == want
        assert codec.encode(text) == [begin, *want]  # adds a begin token
        assert want.count(begin) == text.count("<s>")
        compared += 1
    assert compared >= 5


HOSTILE = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "quiet": "{{ range(99999) | map('string') | map('center', 99999) | join | length }}",
    "class": "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "attribute": "{{ messages | map(attribute='__class__') | first | string + 1 }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "namespace": "{% set ns = namespace(__class__=1) %}",
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "times": "{{ 'x' * 10**10 }}",
    "power": "{{ (10 ** 10) ** (10 ** 9) }}",
    "folded": "{{ 'x' | center(10000000000) }}",
    "width": "{{ '%10000000000d' % 1 }}",
    "bytes": "{{ (1).to_bytes(10000000000) }}",
    "doubled": "{% set ns = namespace(x='x') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "text": "{{ 'x' * 17000000 }}",
    "lorem": "{{ lipsum(n=100000000) }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "nested": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "deep list": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "file": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "lazy import": "{{ 'x'.encode('idna').decode('utf_16_be') }}",
    "undefined": "{{ nothing.at.all }}",
    "syntax": "{% for %}",
    "lines": "{{ raise_exception('a\\nb\\n' * 1000) }}",
    "no text": "{{ raise_exception(none) }}",
    "division": "{{ 1 / 0 }}",
    "sum": "{{ 1 + 'a' }}",
    "no key": "{{ '%(q)s' % {} }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_gives_one_line(name, process):
    assert template(CHATML, process).render([USER])  # the process runs
    began = time.perf_counter()
    with pytest.raises(HotsplitError) as refusal:
        template(HOSTILE[name], process).render([USER])
    assert time.perf_counter() - began < 60  # on a free machine half a second
    assert len(str(refusal.value)) < 450
    assert str(refusal.value).startswith("it ") and "Error" not in str(refusal.value)
    assert template(CHATML, process).render([USER]).startswith("<|im_start|>user")


def test_an_interrupted_render_does_not_answer_the_next(process, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(worker.worker_inside, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        template("{{ 'old' }}", process).render([USER])
    monkeypatch.undo()
    assert template("{{ 'new' }}", process).render([USER]) == "new"


def test_a_worker_that_does_not_read_is_ended(process, monkeypatch):
    process.close()
    monkeypatch.setattr(worker, "WALL_S", 0.3)
    monkeypatch.setattr(worker, "_START", "import time; time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(HotsplitError, match="takes too long"):
        template("{{ 1 }}", process).render([{"role": "user", "content": "x" * (1 << 20)}])
    assert time.monotonic() - began < 30
    monkeypatch.undo()
    assert template("{{ 'new' }}", process).render([USER]) == "new"


def test_a_long_message_is_written_in_pieces(process):
    text = "x" * (5 << 20)
    said = template("{{ messages[0].content }}", process).render([{**USER, "content": text}])
    assert said == text


def test_close_waits_for_a_rendering(process, monkeypatch):
    process.render("it", "", {})
    ask, asked, may_go = worker.exchange, Event(), Event()

    def late(*given):
        asked.set()
        assert may_go.wait(30)
        return ask(*given)

    monkeypatch.setattr(worker, "exchange", late)
    with ThreadPoolExecutor(2) as pool:
        text = pool.submit(process.render, "it", "{{ 1 }}", {})
        assert asked.wait(30)
        closed = pool.submit(process.close)
        is_early = bool(wait([closed], timeout=0.2).done)
        may_go.set()
        assert text.result(30) == "1" and not is_early
        closed.result(30)
    assert process._worker is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_stop_is_the_owners(number, process):
    """A service manager sends it to all processes of a service; answers in progress go on."""
    assert process.render("it", "{{ 1 }}", {}) == "1"
    os.kill(process._worker.pid, number)
    assert process.render("it", "{{ 2 }}", {}) == "2"


LOOKS_BACK = """\
{%- for message in messages -%}
    {%- set before = namespace(role=none, found=false) -%}
    {%- for j in range(loop.index0 - 1, -1, -1) -%}
        {%- if not before.found -%}
            {%- if messages[j].role != 'tool' -%}
                {%- set before.role = messages[j].role -%}
                {%- set before.found = true -%}
            {%- endif -%}
        {%- endif -%}
    {%- endfor -%}
    {%- set after = namespace(text='', stopped=false) -%}
    {%- for k in range(loop.index0 + 1, messages | length) -%}
        {%- if after.stopped -%}
        {%- elif messages[k].role != 'tool' -%}
            {%- set after.stopped = true -%}
        {%- else -%}
            {%- set after.text = after.text + messages[k].content -%}
        {%- endif -%}
    {%- endfor -%}
    {{- message.role ~ ' behind ' ~ before.role ~ ' before ' ~ after.text ~ ';' -}}
{%- endfor -%}"""


def test_4096_messages_of_which_each_looks_at_all_others(process):
    """Gemma 4's template does so."""
    roles = ["user", "assistant", "tool", "tool"] * 1024
    messages = [{"role": role, "content": str(n)} for n, role in enumerate(roles)]
    text = template(LOOKS_BACK, process).render(messages).split(";")
    assert len(text) == 4097 and text[0] == "user behind None before "
    assert text[4093] == "assistant behind user before 40944095"
    assert text[4094] == "tool behind assistant before 4095"


# Loops whose rest may be skipped, or may not.
LOOPS = """
flag => {% for i in range(5) %}{% if not ns.a %}{{ i }}{% set ns.a = i == 3 %}{% endif %}
  {% endfor %}
empty branch => {% for i in range(5) %}{% if ns.a %}{% elif i > 2 %}{% set ns.a = 1 %}{% endif %}
  {% endfor %}{{ ns.a }}
its own variable => {% for i in range(5) %}{% if i != 2 %}{{ i }}{% endif %}{% endfor %}
its own variable first => {% for i in range(5) %}{% if i == 0 %}{% elif ns.b %}{% else %}{{ i }}
  {% endif %}{% endfor %}
an attribute of it => {% for m in messages[::-1] %}{% if m.role != 'user' %}{{ m.content }}
  {% endif %}{% endfor %}
the loop => {% for i in range(5) %}{% if not loop.first %}{{ i }}{% endif %}{% endfor %}
pairs => {% for a, b in [[1, 0], [0, 1]][:] %}{% if a %}{{ b }}{% endif %}{% endfor %}
text around => {% for i in range(5) %}-{% if not ns.a %}{{ i }}{% set ns.a = 1 %}{% endif %}
  {% endfor %}
else => {% for i in range(5) %}{% if ns.a %}{{ i }}{% else %}{% set ns.a = i > 2 %}{% endif %}
  {% endfor %}
a call => {% macro f() %}{% set ns.b = ns.b + 1 %}{% endmacro %}
  {% for i in range(5) %}{% if f() %}{% endif %}{% endfor %}{{ ns.b }}
a generator => {% set x = messages | map(attribute='role') %}
  {% for i in x %}{% if ns.a %}{% endif %}{% endfor %}{{ x | list }}
no item => {% for i in range(0) %}{% if not ns.a %}{% endif %}{% else %}none{% endfor %}
"""


@pytest.mark.parametrize("name, loop", rows_of(LOOPS))
def test_loops_that_end_early_write_the_same(name, loop, process, oracle):
    text = "{% set ns = namespace(a=false, b=0) %}" + loop
    messages = MESSAGES["three"]
    want = oracle.apply_chat_template(messages, chat_template=text, tokenize=False)
    assert template(text, process).render(messages, add_generation_prompt=False) == want


def test_the_process_ends_with_its_owner():
    process = TemplateProcess()
    assert process.render("it", "{{ 1 }}", {}) == "1"
    pid = process._worker.pid
    del process
    assert not Path(f"/proc/{pid}").exists()


def test_the_process_inherits_no_files_and_no_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    process = TemplateProcess()
    process.render("it", "", {})
    pid = process._worker.pid
    assert b"SECRET" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert sorted(path.name for path in Path(f"/proc/{pid}/fd").iterdir()) == ["0", "1", "2"]
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert "Max open files            3" in limits
    process.close()


INVALID = ([], ["text"], [None], [{"content": "x"}], [{"role": 1, "content": "x"}])
INVALID += tuple([{"role": "user", "content": wrong}] for wrong in (object(), b"x"))


@pytest.mark.parametrize("messages", INVALID)
def test_invalid_messages_are_refused(messages, process):
    with pytest.raises(HotsplitError):
        template(CHATML, process).render(messages)


def test_a_message_with_a_lone_surrogate_is_refused_as_text(process):
    text = template(CHATML, process).render([{"role": "user", "content": "\ud800"}])
    codec = TextCodec(byte_level_tokenizer("smollm", 400), None, frozenset())
    with pytest.raises(HotsplitError, match="not UTF-8"):
        codec.encode_rendered(text)


# ---- which template ------------------------------------------------------------------------


def model_with(**keys) -> tuple[ModelFile, TextCodec]:
    known, vocab_size = byte_level_keys()
    shape = make_sizes(vocab_size=vocab_size)
    model = make_model(sizes=shape, extra_keys=known | keys)
    return model, TextCodec.of(model)


def test_the_named_templates_of_a_file():
    keys = {
        TEMPLATE_KEY: "plain {{ bos_token }}",
        f"{TEMPLATE_KEY}.tool_use": "with {{ tools | length }}",
        f"{TEMPLATE_KEY}.rag": "r",
        TEMPLATES_KEY: ["tool_use", "rag", "missing"],
    }
    model, codec = model_with(**keys)
    begin = codec.tokenizer.id_to_token(0)
    found = chat_template_of(model, codec)
    assert found.render([USER]) == f"plain {begin}"
    assert found.render([USER], tools=TOOLS) == "with 1"
    assert chat_template_of(model, codec, "rag").render([USER], tools=TOOLS) == "r"
    with pytest.raises(HotsplitError, match="neither a file nor .* known: chatml, .* rag, tool"):
        chat_template_of(model, codec, "missing")


def test_a_model_without_a_template_says_what_to_do(tmp_path):
    model, codec = model_with()
    with pytest.raises(HotsplitError, match=r"no chat template; give --chat-template NAME\|FILE"):
        chat_template_of(model, codec)
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}!")
    found = chat_template_of(model, codec, str(own))
    assert found.render([{"role": "user", "content": "Hello"}]) == "Hello!"
    for wrong in (tmp_path, tmp_path / "none.jinja", Path("x" * 5000), "a\0b"):
        with pytest.raises(HotsplitError, match="neither a file nor the name"):
            chat_template_of(model, codec, str(wrong))
    own.write_bytes(b"\xff")
    with pytest.raises(HotsplitError, match="cannot be read as text"):
        chat_template_of(model, codec, str(own))


@pytest.mark.parametrize(
    ("name", "text"), [("chatml", CHATML), ("llama2", LLAMA2), ("gemma", GEMMA), ("zephyr", ZEPHYR)]
)
def test_built_in_templates_write_what_the_published_ones_do(name, text, process):
    for messages in ("one", "system", "three", "four", "answered", "five", "wrong order"):
        for head in (True, False):
            try:
                want = template(text, process).render(
                    MESSAGES[messages], add_generation_prompt=head
                )
            except HotsplitError:
                if name == "gemma" and messages != "wrong order":
                    continue  # the first Gemma takes no system message
                with pytest.raises(HotsplitError, match="must alternate"):
                    template(BUILT_IN[name].text, process).render(MESSAGES[messages])
                continue
            ours = template(BUILT_IN[name].text, process)
            assert ours.render(MESSAGES[messages], add_generation_prompt=head) == want


# ---- from a checkpoint ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("checkpoint") / "hf")


def lay_out(folder: Path, where: str) -> None:
    """Writes templates to the places that `where` names, from which transformers reads them."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "config" in where:
        config["chat_template"] = CHATML
    if "list" in where:
        config["chat_template"] = [
            {"name": "default", "template": CHATML},
            {"name": "tool_use", "template": QWEN_TOOLS},
        ]
    path.write_text(json.dumps(config))
    if "file" in where:
        (folder / "chat_template.jinja").write_text(LLAMA2)
    if "folder" in where:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(ZEPHYR)


@pytest.mark.parametrize("where", ["config", "list", "file", "config, file", "file, folder"])
def test_a_checkpoints_templates_survive_conversions(where, checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "hf"))
    lay_out(folder, where)
    convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
    convert(ConvertConfig(source=tmp_path / "m.gguf", output=tmp_path / "n.gguf", outtype="q8_0"))
    theirs = AutoTokenizer.from_pretrained(folder)
    for path in (tmp_path / "m.gguf", tmp_path / "n.gguf"):
        model = ModelFile.load(path)
        found = chat_template_of(model, TextCodec.of(model))
        assert found.text == theirs.get_chat_template()
        assert (found.tool_text or found.text) == theirs.get_chat_template(tools=TOOLS)


def test_a_template_of_a_checkpoint_without_tokenizer_config(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "hf"))
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text("j")
    assert tokenizer_keys(folder, 320, "sparse").keys[TEMPLATE_KEY] == "j"
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text('{"chat_template": "p"}')
    assert tokenizer_keys(folder, 320, "sparse").keys[TEMPLATE_KEY] == "p"


@pytest.mark.parametrize("wrong", [3, {"a": "b"}, ["x"], [{"name": "a"}], [{"template": "a"}]])
def test_a_template_that_is_not_text_is_refused(wrong, checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "hf"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": wrong}))
    with pytest.raises(HotsplitError, match="neither a string nor a list"):
        tokenizer_keys(folder, 320, "sparse")


def test_two_templates_of_one_key_are_refused(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "hf"))
    templates = [{"name": name, "template": name} for name in ("default", "a b", "c", "a-b")]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(HotsplitError, match="hf: .* 'a b' and 'a-b' .* as 'a_b'; rename one"):
        tokenizer_keys(folder, 320, "sparse")

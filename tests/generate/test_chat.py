"""Conversations: every turn equals the whole text computed from scratch, and only new tokens are
computed."""

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from chat_templates import CHATML, DEEPSEEK, QWEN_REASONING
from models import make_model, make_sizes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hotsplit import Engine
from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import GenerationOptions, SamplingOptions
from hotsplit.runtime.generate import chat as chat_module
from hotsplit.runtime.generate import dry
from hotsplit.runtime.generate.chat import ChatOptions, Conversation
from hotsplit.runtime.generate.constraints import regex_constraint
from hotsplit.runtime.generate.dry import cached_breakers
from hotsplit.runtime.generate.sampler_chain import chain_of
from hotsplit.runtime.text.chat_template import ChatTemplate, chat_template_of

SPECIAL = ["<|im_start|>", "<|im_end|>"]
LENGTH = 10  # tokens of an answer
GREEDY = SamplingOptions(temperature=0.0)
SAID = GenerationOptions(max_tokens=LENGTH)


def chat_keys() -> tuple[dict, int]:
    """(keys of a tokenizer of ASCII characters with ChatML's tokens and template, number of
    tokens)."""
    characters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # space, new line
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    keys = {
        "tokenizer.huggingface.json": tokenizer.to_str(),
        "tokenizer.ggml.eos_token_id": np.uint32(tokenizer.token_to_id("<|im_end|>")),
        "tokenizer.chat_template": CHATML,
    }
    return keys, tokenizer.get_vocab_size()


def chat_model(path, context_length: int = 512):
    """Saves a model that writes random characters; returns its path."""
    keys, vocab_size = chat_keys()
    shape = make_sizes(vocab_size=vocab_size, context_length=context_length)
    make_model(sizes=shape, extra_keys=keys).save(path)
    return path


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = chat_model(tmp_path_factory.mktemp("chat") / "m.gguf")
    with Engine.load(path, num_sequences=2) as engine:
        yield engine


def talk(engine, template: str | ChatTemplate = CHATML, sampling=GREEDY, **more) -> Conversation:
    if isinstance(template, str):
        template = replace(chat_template_of(engine.model, engine.codec), text=template)
    options = more.pop("options", ChatOptions(generation=SAID))
    draws = chain_of(sampling, cached_breakers(engine.codec), engine.model.spec.vocab_size)
    return Conversation(
        engine.sequence(), engine.codec, template, engine.traffic, draws, options=options, **more
    )


def text_of(tokens) -> str:
    return "".join(token.text for token in tokens)


def alone(engine, messages, template: str = CHATML, count: int = LENGTH) -> str:
    """The answer to the messages, computed from scratch in a sequence of its own."""
    with closing(chat_template_of(engine.model, engine.codec)) as found:
        text = replace(found, text=template).render(messages)
    return text_of(engine.generate(engine.codec.encode_rendered(text), count, sampling=GREEDY))


def roles(chat) -> str:
    return "".join(message["role"][0] for message in chat.messages)


def test_each_turn_equals_the_whole_text_and_computes_only_new_tokens(engine):
    with talk(engine, system="Be brief.") as chat:
        for number, message in enumerate(("Hello", "What\nelse?", "a b c", "Why?")):
            had = chat.num_tokens
            got = text_of(chat.say(message))
            asked = [{"role": "system", "content": "Be brief."}, *chat.messages[:-1]]
            assert got == alone(engine, asked) == chat.messages[-1]["content"]
            assert len(got) == LENGTH  # a character each, so that every token was compared
            assert chat.run.cached_tokens == (had if number else 0)
            new = len(f"?<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n") - 4 * 9
            assert chat.run.prefill_tokens - had < new + 40 or not number
        assert roles(chat) == "uauauaua"
        assert chat.num_tokens == chat.run.prefill_tokens + LENGTH - 1


def test_another_answer_to_the_same_message(engine):
    with talk(engine) as chat:
        first = text_of(chat.say("Hello"))
        second = text_of(chat.say("And?"))
        assert text_of(chat.regenerate()) == second
        assert chat.run.cached_tokens == chat.run.prefill_tokens - 1
        assert roles(chat) == "uaua" and chat.messages[1]["content"] == first
    with talk(engine, sampling=SamplingOptions(temperature=5.0, seed=1)) as chat:
        first = text_of(chat.say("Hello"))
        assert text_of(chat.regenerate()) != first  # drawn anew
        with closing(chat.regenerate()):  # nothing is consumed
            assert len(chat.messages) == 2
        stopped = chat.regenerate()
        next(stopped)
        stopped.close()
        assert roles(chat) == "ua" and len(chat.messages[1]["content"]) == 1


def test_undo_and_reset(engine):
    with talk(engine, system="Be brief.") as chat:
        first = text_of(chat.say("Hello"))
        text_of(chat.say("And?"))
        assert chat.undo() == "And?" and roles(chat) == "ua"
        text_of(chat.say("Well"))
        assert chat.messages[-1]["content"] == alone(
            engine, [{"role": "system", "content": "Be brief."}, *chat.messages[:-1]]
        )
        chat.reset()
        assert text_of(chat.say("Hello")) == first and roles(chat) == "ua"
        assert chat.undo() == "Hello"
        for command in (chat.undo, lambda: text_of(chat.regenerate())):
            with pytest.raises(HotsplitError):
                command()


def test_a_new_system_message_applies_from_the_next_turn(engine):
    with talk(engine) as chat:
        text_of(chat.say("Hello"))
        chat.system = "Shout."
        got = text_of(chat.say("And?"))
        assert got == alone(engine, [{"role": "system", "content": "Shout."}, *chat.messages[:-1]])


def test_a_conversation_is_saved_and_loaded(engine, tmp_path):
    path = tmp_path / "new" / "talk.json"
    with talk(engine, system="Be brief. \u00e9") as chat:
        text_of(chat.say("Hello \U0001f98a"))
        chat.save(path)
        chat.save(path)  # which may overwrite its own file
        want = text_of(chat.say("And?"))
    with talk(engine) as chat:
        chat.load(path)
        assert chat.system == "Be brief. \u00e9" and roles(chat) == "ua"
        assert text_of(chat.say("And?")) == want
        known = {"format": "hotsplit-chat", "version": 1, "messages": []}
        changed = ({"version": 2}, {"messages": ["x"]}, {"more": 1}, {"system": 3})
        for wrong in ("{}", "[]", "x", *(json.dumps(known | change) for change in changed)):
            other = tmp_path / "other.json"
            other.write_text(wrong)
            with pytest.raises(HotsplitError):
                chat.load(other)
            with pytest.raises(HotsplitError, match="not a saved conversation"):
                chat.save(other)
            assert other.read_text() == wrong and roles(chat) == "uaua"
        with pytest.raises(HotsplitError):
            chat.save(tmp_path)


def test_an_interrupted_answer_is_kept_up_to_the_interruption(engine):
    with talk(engine) as chat:
        tokens = chat.say("Hello")
        said = "".join(next(tokens).text for _ in range(4))
        tokens.close()
        assert chat.messages[-1] == {"role": "assistant", "content": said}
        had = chat.num_tokens
        got = text_of(chat.say("And?"))
        assert got == alone(engine, chat.messages[:-1])
        assert chat.run.cached_tokens == had


def test_an_interrupted_prompt_removes_its_message(engine, monkeypatch):
    with talk(engine) as chat:
        text_of(chat.say("Hello"))

        def interrupted(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(engine._live.__class__, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            text_of(chat.say("And?"))
        monkeypatch.undo()
        assert roles(chat) == "ua"
        assert text_of(chat.say("Well")) == alone(engine, chat.messages[:-1])


def test_a_long_prompt_is_computed_in_pieces(engine, monkeypatch):
    monkeypatch.setattr(chat_module, "PIECE", 16)
    with talk(engine) as chat:
        pieces = [token for token in chat.say("x" * 100) if token.id is None]
        assert len(pieces) == 7
        assert chat.messages[-1]["content"] == alone(engine, chat.messages[:-1])
        assert chat.run.cached_tokens == 0 and chat.run.prefill_tokens > 100
        had = chat.num_tokens
        tokens = chat.say("y" * 100)
        assert [next(tokens).text for _ in range(3)] == [""] * 3
        tokens.close()  # in the middle of the prompt
        assert roles(chat) == "ua" and chat.num_tokens == had + 48
        text_of(chat.say("y" * 100))
        assert chat.run.cached_tokens == had + 48
        assert chat.messages[-1]["content"] == alone(engine, chat.messages[:-1])


def test_a_full_context_is_refused_until_a_reset(engine):
    endless = ChatOptions(generation=GenerationOptions(max_tokens=-1, ignores_end=True))
    with talk(engine, options=endless) as chat:
        text_of(chat.say("Hello"))
        assert chat.run.stopped_by == "context" and roles(chat) == "ua"
        for _ in range(2):
            with pytest.raises(HotsplitError, match=r"context of 512: begin another \(/reset\)"):
                text_of(chat.say("And?"))
            assert roles(chat) == "ua"
        chat.reset()
        with pytest.raises(HotsplitError, match="tokens for a context of 512"):
            text_of(chat.say("x" * 600))
        assert not chat.messages


def test_the_oldest_turns_are_dropped_on_request(engine):
    options = ChatOptions(generation=SAID, drops_oldest=True)
    with talk(engine, system="Be brief.", options=options) as chat:
        for number in range(12):
            text_of(chat.say(f"Message {number} " + "x" * 40))
            kept = chat.messages[chat.num_dropped : -1]
            assert kept[0]["role"] == "user"
            asked = [{"role": "system", "content": "Be brief."}, *kept]
            assert chat.messages[-1]["content"] == alone(engine, asked)
            assert chat.num_tokens <= 512 * 3 // 4 + LENGTH
        assert roles(chat) == "ua" * 12 and chat.num_dropped >= 10
        chat.undo()
        text_of(chat.say("x"))
        dropped = chat.num_dropped
        with pytest.raises(HotsplitError, match="tokens for a context"):
            text_of(chat.say("x" * 600))
        assert chat.num_dropped == dropped


def test_the_vocabulary_is_read_once_for_breakers(tmp_path, monkeypatch):
    read, find = [], dry.dry_breakers

    def counted(codec, texts):
        read.append(texts)
        return find(codec, texts)

    monkeypatch.setattr(dry, "dry_breakers", counted)
    sampling = SamplingOptions(temperature=0.0, dry_multiplier=0.8)
    with Engine.load(chat_model(tmp_path / "m.gguf")) as engine:
        for _ in range(3):
            list(engine.generate("ab", max_tokens=2, sampling=sampling))
            with engine.chat(template="chatml", sampling=sampling) as chat:
                text_of(chat.say("x"))
    assert read == [sampling.dry_sequence_breakers]


def test_messages_that_the_template_rejects_are_removed(engine):
    template = "{{ raise_exception('no') if messages|length > 2 else 'x' }}"
    with talk(engine, template) as chat:
        text_of(chat.say("Hello"))
        with pytest.raises(HotsplitError, match="rejects these messages: no"):
            text_of(chat.say("And?"))
        assert roles(chat) == "ua"
    with talk(engine, "") as chat, pytest.raises(HotsplitError, match="to an empty text"):
        text_of(chat.say("Hello"))


def test_closing_a_conversation_releases_its_sequence(engine):
    for _ in range(4):
        with talk(engine), talk(engine) as chat, pytest.raises(HotsplitError, match="in use"):
            engine.sequence()
        with pytest.raises(HotsplitError, match="closed"):
            text_of(chat.say("Hello"))


def test_the_end_of_a_turn_in_a_built_in_template(engine):
    """The end of a turn is an end token if the tokenizer has it, otherwise a stop string."""
    with talk(engine, CHATML) as chat:
        end = engine.codec.tokenizer.token_to_id("<|im_start|>")
        known = ChatTemplate(name="it", text=CHATML, turn_end="<|im_start|>")
        with talk(engine, known) as other:
            assert other._codec.end_ids == chat._codec.end_ids | {end}
        first = text_of(chat.say("Hello"))
    cut = first[3:5]
    with talk(engine, ChatTemplate(name="it", text=CHATML, turn_end=cut)) as chat:
        assert text_of(chat.say("Hello")) == first[: first.index(cut)]
        assert chat.run.stopped_by == "stop string"


def test_each_answer_has_its_own_constraint(engine):
    made = []

    def new_mask():
        made.append(regex_constraint(f"z{{{LENGTH}}}", engine.codec))
        return made[-1]

    with talk(engine, new_mask=new_mask) as chat:
        assert text_of(chat.say("Hello")) == text_of(chat.say("And?")) == "z" * LENGTH
    assert [mask.can_end for mask in made] == [True, True]  # each has taken the whole answer
    with talk(engine, CHATML + "<think>", new_mask=new_mask) as chat:
        assert text_of(chat.say("Hello")) != "z" * LENGTH and not made[-1].can_end
        assert chat.messages[-1]["reasoning_content"] and not chat.messages[-1]["content"]


# ---- reasoning -----------------------------------------------------------------------------

# Templates in the style of published ones, with the marks that are special tokens there.
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
GPT_OSS = """\
{%- for message in messages %}
{%- if '<|channel|>' in message.content %}{{ raise_exception('marks in the content') }}{% endif %}
{%- if message.role == 'assistant' and message.thinking and loop.last
   and not add_generation_prompt %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>' + message.role + ('<|channel|>final' if message.role == 'assistant' else '') }}
{{- '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
TAGS = ("<think>", "</think>")
OPENS = CHATML + "{{ '<think>\\n' }}"
# Template, special tokens, what the model writes, and (reasoning, content).
FINAL = "<|channel|>final<|message|>Paris"
EASY = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant"
CUT = "<|channel|>analysis<|message|>Let me see"
THOUGHT = "<think>\nEasy.\n</think>\n\nParis"
BOTH = ("Easy.", "Paris")
ANSWERS = {
    "final": (GPT_OSS, HARMONY, FINAL, ("", "Paris")),
    "two channels": (GPT_OSS, HARMONY, EASY + FINAL, BOTH),
    "cut in the analysis": (GPT_OSS, HARMONY, CUT, ("Let me see", "")),
    "tags as special tokens": (CHATML, TAGS, THOUGHT, BOTH),
    "tags as text": (CHATML, (), THOUGHT, BOTH),
    "opened by the prompt": (OPENS, TAGS, THOUGHT.removeprefix("<think>\n"), BOTH),
    "none": (CHATML, TAGS, "Paris <thin", ("", "Paris <thin")),
}


class Script:
    """In place of a chain of samplers: answers that the model is to write, each up to its end."""

    def __init__(self, codec, *answers):
        self.codec, self.answers = codec, answers
        self.ids = [id for answer in answers for id in (*codec.encode_rendered(answer), END_ID)]

    def sample(self, logits_V, ids, mask_V=None):
        token_id = self.ids.pop(0)
        assert mask_V is None or mask_V[token_id], self.codec.tokenizer.id_to_token(token_id)
        return token_id


END_ID = 97  # <|im_end|>


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """An engine whose vocabulary has all these marks as special tokens, by those that are there."""
    engines = {}

    def made(marks):
        if marks not in engines:
            keys, _ = chat_keys()
            tokenizer = Tokenizer.from_str(keys["tokenizer.huggingface.json"])
            assert tokenizer.token_to_id("<|im_end|>") == END_ID
            tokenizer.add_special_tokens(list(marks))
            keys["tokenizer.huggingface.json"] = tokenizer.to_str()
            sizes = make_sizes(vocab_size=tokenizer.get_vocab_size(), context_length=1024)
            path = tmp_path_factory.mktemp("marked") / "m.gguf"
            make_model(sizes=sizes, extra_keys=keys).save(path)
            engines[marks] = Engine.load(path, num_sequences=2)
        return engines[marks]

    yield made
    for engine in engines.values():
        engine.close()


def scripted(engine, template, *answers, **more) -> Conversation:
    template = replace(chat_template_of(engine.model, engine.codec), text=template)
    options = ChatOptions(generation=GenerationOptions(max_tokens=400))
    draws = Script(engine.codec, *answers)
    return Conversation(
        engine.sequence(), engine.codec, template, engine.traffic, draws, options=options, **more
    )


def parts_of(tokens) -> tuple[str, str]:
    """(reasoning, content)."""
    found = {True: "", False: ""}
    for token in tokens:
        found[token.is_reasoning] += token.text
    return found[True], found[False]


@pytest.mark.parametrize("name", ANSWERS)
def test_reasoning_and_text_are_apart_and_so_in_the_next_prompt(marked, name):
    template, marks, answer, (reasoning, content) = ANSWERS[name]
    engine = marked(marks)
    with scripted(engine, template, answer, answer) as chat:
        assert parts_of(chat.say("Hello")) == (reasoning, content)
        thoughts = {"reasoning_content": reasoning} if reasoning else {}
        assert chat.messages[-1] == {"role": "assistant", "content": content, **thoughts}
        assert parts_of(chat.say("And?")) == (reasoning, content)
        chat.messages.append({"role": "user", "content": "So?"})
        _, first = chat._prompt()
        text = engine.codec.tokenizer.decode(first, skip_special_tokens=False)
        assert text.count(content) >= 2 and "Easy." not in text and "Let me see" not in text
        whole = replace(chat_template_of(engine.model, engine.codec), text=template)
        with closing(whole):  # as the template writes messages with both
            assert text == whole.render(chat.messages)


@pytest.mark.parametrize("name", ["two channels", "tags as special tokens"])
def test_an_answer_that_is_stopped_keeps_what_was_said(marked, name):
    template, marks, answer, (reasoning, content) = ANSWERS[name]
    for count in range(1, len(marked(marks).codec.encode_rendered(answer)), 3):
        with scripted(marked(marks), template, answer) as chat:
            said = chat.say("Hello")
            shown = parts_of(next(said) for _ in range(count))
            said.close()
            if not chat.messages:
                assert shown == ("", "")
                continue
            kept = chat.messages[-1]
            both = (kept.get("reasoning_content", ""), kept["content"])
            assert reasoning.startswith(shown[0]) and content.startswith(shown[1])
            assert both[0].startswith(shown[0]) and both[1].startswith(shown[1])


@pytest.mark.parametrize("template", [DEEPSEEK, QWEN_REASONING])
def test_earlier_reasoning_in_a_saved_conversation_is_left_out(engine, template):
    """One that has its thoughts in the content, as other programs write it."""
    with talk(engine, template) as chat:
        list(chat.say("Hello"))
        chat.messages[-1] = {"role": "assistant", "content": "<think>\nsecret\n</think>\n\nPlain."}
        got = text_of(chat.say("And?"))
        assert got == alone(engine, chat.messages[:-1], template)
        text = engine.codec.tokenizer.decode(chat._sequence.ids)
        assert "Plain." in text and "secret" not in text

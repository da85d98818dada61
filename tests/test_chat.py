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
from hotsplit.options.generation import GenerationOptions, SamplingOptions
from hotsplit.runtime.generate import chat as chat_module
from hotsplit.runtime.generate import dry
from hotsplit.runtime.generate.chat import ChatOptions, Conversation
from hotsplit.runtime.generate.constraints import regex_constraint
from hotsplit.runtime.generate.dry import cached_breakers
from hotsplit.runtime.generate.reasoning import ReasoningSplitter, close_reasoning, opens_reasoning
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
        for wrong in (
            "{}", "[]", "x", '{"format": "hotsplit-chat", "version": 2, "messages": []}',
            json.dumps({"format": "hotsplit-chat", "version": 1, "messages": ["x"]}),
            json.dumps({"format": "hotsplit-chat", "version": 1, "messages": [], "more": 1}),
            json.dumps({"format": "hotsplit-chat", "version": 1, "messages": [],
                        "system": 3}),
        ):  # fmt: skip
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
        assert text_of(chat.say("Hello")) != "z" * LENGTH
        assert chat.is_reasoning_open and not made[-1].can_end


# ---- reasoning -----------------------------------------------------------------------------

ANSWERS = {
    "<think>a b</think>c": [("<think>a b</think>", True), ("c", False)],
    "\n <think></think>\n\nc": [("\n <think></think>", True), ("\n\nc", False)],
    "<think>never closed </thin": [("<think>never closed </thin", True)],
    "no <think>a</think>": [("no <think>a</think>", False)],
    "<thin": [("<thin", False)],
    "<think>a</think>b<think>c</think>": [
        ("<think>a</think>", True), ("b<think>c</think>", False),
    ],
    "": [],
}  # fmt: skip


def joined(parts) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    for text, is_reasoning in parts:
        if found and found[-1][1] == is_reasoning:
            text = found.pop()[0] + text
        found.append((text, is_reasoning))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("answer", ANSWERS)
def test_reasoning_is_separated_wherever_pieces_end(answer, size):
    splitter = ReasoningSplitter(is_open=False)
    pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush()
    assert joined(parts) == ANSWERS[answer]
    if answer.startswith("<think>"):  # begun by the template
        splitter = ReasoningSplitter(is_open=True)
        parts = splitter.push(answer.removeprefix("<think>")) + splitter.flush()
        assert ("<think>" + joined(parts)[0][0], True) == ANSWERS[answer][0]


def test_an_interrupted_reasoning_is_closed():
    assert close_reasoning("<think>a", is_open=False) == "<think>a\n</think>\n\n"
    assert close_reasoning("a", is_open=True) == "a\n</think>\n\n"
    for whole in ("<think>a</think>b", "a <think> b"):
        assert close_reasoning(whole, is_open=False) == whole
    assert opens_reasoning("<|Assistant|><think>\n") and not opens_reasoning("<think></think>")


@pytest.mark.parametrize(
    "continued, is_open",
    [
        ("<think>Let me see, ", True),
        ("\n<think>", True),
        ("<think>So.</think>Four", False),
        ("The tag <think>", False),  # reasoning only begins an answer
        ("Well,", False),
        (" ", False),
    ],
)
def test_a_continued_message_decides_whether_reasoning_is_open(continued, is_open):
    prompt = "user: What is <think>?\nassistant: "
    assert opens_reasoning(prompt + continued, continued) == is_open
    assert not opens_reasoning(prompt)


@pytest.mark.parametrize(("template", "is_open"), [(DEEPSEEK, True), (QWEN_REASONING, False)])
def test_reasoning_is_left_out_of_the_next_prompt(engine, template, is_open):
    with talk(engine, template) as chat:
        tokens = chat.say("Hello")
        next(tokens)
        tokens.close()
        assert chat.is_reasoning_open == is_open
        assert ("</think>" in chat.messages[-1]["content"]) == is_open
        whole = text_of(chat.regenerate())  # up to the token limit, in the middle of the reasoning
        assert chat.messages[-1]["content"] == whole + ("\n</think>\n\n" if is_open else "")
        chat.messages[-1]["content"] = "<think>\nsecret\n</think>\n\nPlain."
        got = text_of(chat.say("And?"))
        assert got == alone(engine, chat.messages[:-1], template)
        text = engine.codec.tokenizer.decode(chat._sequence.ids)
        assert "Plain." in text and "secret" not in text

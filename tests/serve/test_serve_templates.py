"""The server with chat templates of several kinds: none at all, a broken one, one that wants
turns."""

import pytest
from chat_templates import GEMMA
from serving import SAID, TOOL, Served, save_model

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}
WRITTEN = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def test_a_file_without_a_template_is_served_in_chatml(tmp_path):
    with Served(save_model(tmp_path, template=None)) as served:
        assert any("no chat template: chats are written in chatml" in line for line in served.log)
        status, answer = served.ask("/apply-template", {"messages": SAID})
        wanted = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        assert (status, answer["prompt"]) == (200, wanted)
        said = served.chat(grammar='root ::= "a<|im_end|>b"', max_tokens=40)["choices"][0]
        assert (said["message"]["content"], said["finish_reason"]) == ("a", "stop")


RAG = {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "r"}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"template": "{% for %}"}, "is not a valid Jinja template"),
        ({"template": "{{ 1 + 'a' }}"}, "fails with these messages"),
        ({"template": None, **RAG}, "its own are named rag"),
    ],
)
def test_a_template_that_cannot_be_used_is_said_at_the_start(keys, reason, tmp_path):
    with Served(save_model(tmp_path, **keys)) as served:
        assert any("chats are refused" in line and reason in line for line in served.log)
        status, answer = served.ask("/v1/chat/completions", {"messages": SAID})
        assert status == 501 and reason in answer["error"]["message"]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    model = save_model(tmp_path_factory.mktemp("serve"), template=GEMMA, context_length=1024)
    with Served(model) as served:
        yield served


def turns_of(served, *messages, **fields):
    """The prompt's turns: role, a line end, text."""
    status, answer = served.ask("/apply-template", {"messages": messages, **fields})
    assert status == 200, answer
    turns = answer["prompt"].split("<start_of_turn>")[1:]
    assert turns[-1] == "model\n"
    return [turn.removesuffix("<end_of_turn>\n") for turn in turns[:-1]]


def test_calls_and_results_where_roles_alternate(gemma):
    """Results are the user's there, so a message behind them would be the user's second one."""
    result = "user\n<tool_response>\n42\n</tool_response>"
    first, *turns = turns_of(gemma, *SAID, CALLED, RESULT, tools=[TOOL])
    assert first.startswith("user\n# Tools") and turns == [f"model\n{WRITTEN}", result]
    asked = {"role": "user", "content": "And now?"}
    _, *turns = turns_of(gemma, *SAID, CALLED, RESULT, asked, tools=[TOOL])
    assert turns == [f"model\n{WRITTEN}", f"{result}\n\nAnd now?"]
    said = {"role": "assistant", "content": "Let me look."}
    _, *turns = turns_of(gemma, *SAID, said, CALLED, RESULT, RESULT, tools=[TOOL])
    assert turns[0] == f"model\nLet me look.\n\n{WRITTEN}" and turns[1].count("42") == 2


def test_messages_in_succession_without_tools(gemma):
    asked = {"role": "user", "content": "And now?"}
    assert turns_of(gemma, *SAID, asked) == ["user\nHello\n\nAnd now?"]
    asked = {"input": [*SAID, asked], "max_output_tokens": 2}
    status, answer = gemma.ask("/v1/responses", asked)
    assert status == 200, answer
    wrong = {"messages": [{"role": "assistant", "content": "Hm"}, *SAID]}
    status, answer = gemma.ask("/apply-template", wrong)
    assert status == 400 and "must alternate" in answer["error"]["message"]


REFUSED = "I cannot help with that."
PART = {"type": "refusal", "refusal": REFUSED}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": [PART]}, REFUSED),
        ({"content": [{"type": "text", "text": "Hm."}, PART]}, f"Hm.\n{REFUSED}"),
        ({"content": None, "refusal": REFUSED}, REFUSED),
        ({"refusal": REFUSED}, REFUSED),
        ({"content": "Yes.", "refusal": None}, "Yes."),
    ],
)
def test_a_refusal_in_an_earlier_answer_is_its_text(gemma, message, text):
    said = [*SAID, {"role": "assistant", **message}, {"role": "user", "content": "Why?"}]
    assert turns_of(gemma, *said)[1] == f"model\n{text}"


def test_a_refusal_in_items_and_where_none_belongs(gemma):
    items = [*SAID, {"type": "message", "role": "assistant", "content": [PART]}, *SAID]
    status, answer = gemma.ask("/v1/responses", {"input": items, "max_output_tokens": 2})
    assert status == 200, answer
    for part in (PART | {"refusal": 1}, {"type": "refusal"}):
        said = [*SAID, {"role": "assistant", "content": [part]}, *SAID]
        status, answer = gemma.ask("/apply-template", {"messages": said})
        assert status == 400 and "whose refusal is missing" in answer["error"]["message"]
    status, answer = gemma.ask(
        "/apply-template", {"messages": [{"role": "user", "content": [PART]}]}
    )
    assert status == 400 and "only reads text" in answer["error"]["message"]

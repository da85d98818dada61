"""The server with chat templates of several kinds: none at all, a broken one, one that wants turns;
and loops of calls and results over HTTP with OpenAI's client, with templates that want them in
different forms."""

import json

import jsonschema
import openai
import pytest
from call_writers import WRITERS
from chat_templates import GEMMA
from serving import SAID, TOOL, Served, save_model
from tool_templates import CALL_TEMPLATES

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


FIRST = {"name": "f", "arguments": {"city": "K\u00f6ln", "n": 2}}
SECOND = {"name": "f", "arguments": {"city": "Paris"}}
NAMES = ("qwen", "mistral, nine", "no calls", "llama", "gemma")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("loops"), context_length=2048)


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def served(model, name, tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(CALL_TEMPLATES[name][0], encoding="utf-8")
    with Served(model, "--chat-template", str(path)) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def grammar_of(text):
    """A grammar of one text."""
    return f"root ::= {json.dumps(text, ensure_ascii=False)}"


def written(name, *calls):
    return WRITERS[CALL_TEMPLATES[name][1]](*calls)


def answer_of(client, messages, text, *, is_stream):
    """(content, calls, finish reason) of an answer with this text."""
    given = {
        "model": "any",
        "messages": messages,
        "tools": [TOOL],
        "extra_body": {"grammar": grammar_of(text)},
    }
    if not is_stream:
        (choice,) = client.chat.completions.create(**given).choices
        calls = [call.model_dump() for call in choice.message.tool_calls or []]
        return choice.message.content or "", calls, choice.finish_reason
    content, calls, reason = "", [], None
    for chunk in client.chat.completions.create(**given, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.index == len(calls)
            calls.append(call.model_dump(exclude={"index"}))
        reason = choice.finish_reason or reason
    return content, calls, reason


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_loop_of_three_turns(served, client, name, is_stream):
    messages = [{"role": "user", "content": "Hello"}]
    said = "" if name == "llama" else "Well."  # whose calls have no text before them
    for wanted in ([FIRST], [SECOND, FIRST]):
        text = said + written(name, *wanted)
        content, calls, reason = answer_of(client, messages, text, is_stream=is_stream)
        assert (content, reason) == (said, "tool_calls")
        functions = [call["function"] for call in calls]
        assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [
            (call["name"], call["arguments"]) for call in wanted
        ]
        assert len({call["id"] for call in calls}) == len(calls)
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "grey"} for call in calls
        ]
    content, calls, reason = answer_of(client, messages, "It is grey.", is_stream=is_stream)
    assert (content, calls, reason) == ("It is grey.", [], "stop")
    _, rendered = served.ask("/apply-template", {"messages": messages, "tools": [TOOL]})
    assert rendered["prompt"].count("K\u00f6ln") == 2 and "'city'" not in rendered["prompt"]


def test_ids_of_another_server_are_accepted(served, name):
    call = {
        "id": "call_0123456789abcdef01234567",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    messages = [
        *SAID,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "42"},
    ]
    status, answer = served.ask("/apply-template", {"messages": messages, "tools": [TOOL]})
    assert status == 200, answer
    assert served.chat(messages=messages, max_tokens=2)["choices"]


def test_no_calls_at_all_are_like_none(served):
    messages = [*SAID, {"role": "assistant", "content": "Well.", "tool_calls": []}, *SAID]
    status, answer = served.ask("/apply-template", {"messages": messages, "tools": [TOOL]})
    assert status == 200 and answer["prompt"].count("Well.") == 1


@pytest.mark.parametrize("arguments", ["", "{}", None, {}, '{"a": "\\u00e9"}'])
def test_arguments_in_earlier_calls(served, arguments):
    call = {
        "id": "abcDEF012",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    }
    messages = [*SAID, {"role": "assistant", "tool_calls": [call]}]
    status, answer = served.ask("/apply-template", {"messages": messages, "tools": [TOOL]})
    assert status == 200 and ("\u00e9" in answer["prompt"]) is (
        arguments not in ("", "{}", None, {})
    )


@pytest.mark.parametrize("is_stream", [False, True])
def test_items_of_a_response_are_in_the_models_order(client, name, is_stream):
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    if name == "llama":
        pytest.skip("a call is at the beginning only")
    text = f"One.{written(name, FIRST)}\nTwo.{written(name, SECOND)}"
    response = client.responses.create(
        model="any",
        input="Hello",
        tools=[tool],
        extra_body={"grammar": grammar_of(text)},
        stream=is_stream,
    )
    if is_stream:
        *_, last = response
        response = last.response
    kinds = [item.type for item in response.output]
    assert kinds == ["message", "function_call", "message", "function_call"]
    assert json.loads(response.output[3].arguments) == SECOND["arguments"]


# ---- required calls ------------------------------------------------------------------------------

CHOICE = json.loads("""
{"type": "object", "properties": {"a": {"enum": ["x", "</tool_call>"]}, "b": {"type": "boolean"}},
"required": ["a", "b"], "additionalProperties": false}
""")


def tool_of(name, parameters, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_required_call_is_made(client, name, choice):
    """The model is random, would never make one, and would not end: one call is all that is allowed
    where calls are not parallel, or a function is named."""
    tools = [tool_of("f", CHOICE), tool_of("g", CHOICE)]
    single = {"parallel_tool_calls": False} if choice == "required" else {}
    given = {"messages": SAID, "tools": tools, "tool_choice": choice, **single}
    drawn = {"seed": 1, "temperature": 2, "max_tokens": 500, "logit_bias": {"0": -100}}
    (answer,) = client.chat.completions.create(model="any", **given, **drawn).choices
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    (call,) = answer.message.tool_calls
    assert call.function.name in ("f", "g") and (choice == "required" or call.function.name == "g")
    jsonschema.validate(json.loads(call.function.arguments), CHOICE)


def test_one_of_the_allowed_tools_is_called(served, client):
    tools = [tool_of("f", CHOICE), tool_of("g", CHOICE)]
    allowed = {"mode": "required", "tools": [NAMED]}
    answer = served.chat(
        tools=tools,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        parallel_tool_calls=False,
    )
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "g"
    flat = [{"type": "function", "name": n, "parameters": CHOICE} for n in "fg"]
    choice = {"type": "function", "name": "g"}
    given = {"tools": flat, "tool_choice": choice, "parallel_tool_calls": False}
    response = client.responses.create(model="any", input="Hello", **given)
    assert [item.name for item in response.output] == ["g"]


def test_a_schema_that_cannot_be_enforced(served, name):
    schema = {"type": "object", "properties": {}, "not": {"required": ["a"]}}
    asked = {"tool_choice": "required", "max_tokens": 40, "messages": SAID}
    loose = {**asked, "tools": [tool_of("f", schema)]}
    before = len(served.log)
    assert served.ask("/v1/chat/completions", loose)[0] == 200
    if name not in ("qwen-coder", "gemma"):  # whose grammars have a rule for each property
        served.until(lambda: any("any object" in line for line in served.log[before:]))
        strict = {**asked, "tools": [tool_of("f", schema, strict=True)]}
        status, answer = served.ask("/v1/chat/completions", strict)
        assert status == 400 and answer["error"]["param"] == "tool_choice"

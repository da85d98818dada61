"""Values that the server refuses, and the field that each error names."""

import json

import pytest
from case_tables import rows_of
from serving import SAID, TOOL, Served

pytest_plugins = ("serve_fixtures",)


@pytest.fixture(scope="module")
def served(model):
    with Served(model, "--parallel", "1") as served:
        yield served


# The field that the error names => its value.
WRONG = r"""
messages => "Hello"
messages => []
messages => [{"role": "user", "content": "\ud800"}]
dry_sequence_breakers => ["\ud800"]
stop => "a\udfff"
stop => ["\udc00\ud800"]
logit_bias => [["\ud800", 1]]
grammar => "root ::= \"\ud800\""
user => "\ud800"
json_schema => {"enum": ["\ud800"]}
json_schema => {"properties": {"\ud800": {}}}
tools => [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]
chat_template_kwargs => {"a": "\ud800"}
samplers => ["\ud800"]
metadata => {"\ud800": 1}
dry_multiplier => "\ud800"
temperature => "hot"
temperature => true
top_p => 2
typical_p => 7
top_k => 1.5
seed => 18446744073709551616
n => 0
n => 17
max_tokens => 0
max_tokens => "9"
stop => [""]
logit_bias => {"99999": 1}
logit_bias => {"a": 1}
logit_bias => {"1": "x"}
timeout => 0
timeout => -1e308
samplers => ["top_q"]
top_logprobs => 3
stream => "yes"
stream_options => {"include_usage": true}
json_schema => {"type": "object", "not": {}}
grammar => "root ::= oops"
tool_choice => "required"
modalities => ["audio"]
functions => [{}]
chat_template => "{{ 1 }}"
reasoning_effort => "huge"
"""
# The field that the error names => the request's fields.
WRONG_WITH_OTHERS = r"""
messages[0].role => {"messages": [{"role": "king", "content": "a"}]}
messages[0].content => {"messages": [{"role": "user", "content": 5}]}
messages[0].content => {"messages": [{"role": "user"}]}
messages[0].content => {"messages": [{"role": "system", "content": null}]}
messages[0].content => {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
? => {"\ud800": 1}
top_logprobs => {"logprobs": true, "top_logprobs": 21}
response_format.type => {"response_format": {"type": "xml"}}
response_format.json_schema => {"response_format": {"type": "json_schema"}}
grammar => {"grammar": "root ::= \"a\"", "json_schema": {}}
tools[0] => {"tools": [{"type": "web_search"}]}
tools[0] => {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}
tools => {"tools": [{"type": "function", "function": {"name": "\ud800"}}],
  "tool_choice": "required"}
"""
CHOICES = r"""
"any"
5
{}
{"type": "function"}
{"type": "function", "function": {"name": "g"}}
{"type": "function", "function": {"name": 5}}
{"type": "allowed_tools"}
{"type": "allowed_tools", "mode": "required", "tools": []}
{"type": "allowed_tools", "mode": "some", "tools": [{"type": "function",
  "function": {"name": "f"}}]}
"""
HUGE = ("temperature", "top_p", "top_k", "seed", "timeout")
ARGUMENTS = ("{", "nonsense", "[1]", '{"a": NaN}', '{"a": 1e400}', '"\\ud800"')


def called_with(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    "param, fields",
    [
        *((name, {name: json.loads(value)}) for name, value in rows_of(WRONG)),
        *((name, json.loads(fields)) for name, fields in rows_of(WRONG_WITH_OTHERS)),
        *((name, {name: 10**400}) for name in HUGE),
        *(("messages[0].tool_calls[0].function.arguments", called_with(x)) for x in ARGUMENTS),
        *(
            ("tool_choice", {"tools": [TOOL], "tool_choice": json.loads(choice)})
            for (choice,) in rows_of(CHOICES)
        ),
        ("tool_choice", {"tools": [TOOL], "tool_choice": "required", "json_schema": {}}),
        (None, {"temperature": 1e999}),
        ("temperature", {"temperature": -(10**400)}),
        ("stop", {"stop": ["a"] * 65}),
        ("stop", {"stop": "a" * 257}),
        ("logit_bias", {"logit_bias": {str(i): 1 for i in range(1025)}}),
        ("logit_bias", {"logit_bias": {"1": 10**400}}),
        ("logit_bias", {"logit_bias": [["a" * 257, 1]]}),
        ("json_schema", {"json_schema": {"description": "x" * (64 << 10)}}),
        ("messages", {"messages": [{"role": "user", "content": "word " * 400}]}),
    ],
)
def test_wrong_values_are_refused(served, fields, param):
    status, answer = served.ask("/v1/chat/completions", {"messages": SAID, **fields})
    assert status == 400, answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param, error
    assert error["code"] and error["message"] and "\n" not in error["message"]


NO_OBJECTS = ("", "{", "[]", "null", '"a"', '{"n": NaN}', b"\xff{}")
TOO_DEEP = ("[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000)
NESTED = '{"messages": [' + "[" * 100 + "]" * 100 + "]}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_invalid_json_is_refused(served, path):
    for raw in (*NO_OBJECTS, *TOO_DEEP, NESTED, '{"seed": ' + "9" * 10_000 + "}"):
        status, answer = served.ask(path, raw=raw, method="POST")
        assert status == 400 and answer["error"]["type"] == "invalid_request_error", raw[:40]
        assert "recursion" not in answer["error"]["message"]


def test_a_text_part_without_text_is_not_called_a_picture(served):
    part = {"type": "text", "text": 5}
    body = {"messages": [{"role": "user", "content": [part]}]}
    status, answer = served.ask("/v1/chat/completions", body)
    assert status == 400 and "whose text is missing or not a string" in answer["error"]["message"]


# The path => the field that the error names => the request.
OTHERS = r"""
/v1/completions => prompt => {}
/v1/completions => prompt => {"prompt": []}
/v1/completions => prompt => {"prompt": [99999]}
/v1/completions => prompt => {"prompt": ["a", 1]}
/v1/completions => suffix => {"prompt": "a", "suffix": "b"}
/infill => input_prefix => {"input_prefix": "a", "input_suffix": "b"}
/infill => input_suffix => {"input_prefix": "a"}
/infill => input_extra[0].text => {"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}
/infill => n => {"input_prefix": "a", "input_suffix": "b", "n": 2}
/v1/completions => best_of => {"prompt": "a", "best_of": 3}
/v1/completions => max_tokens => {"prompt": "a", "echo": true, "max_tokens": 0}
/v1/completions => max_tokens => {"prompt": "a", "logprobs": 1, "max_tokens": 0}
/v1/completions => prompt => {"prompt": ""}
/v1/responses => input => {}
/v1/responses => previous_response_id => {"input": "a", "previous_response_id": "r"}
/v1/responses => background => {"input": "a", "background": true}
/v1/responses => input[0] => {"input": [{"type": "computer_call"}]}
/v1/responses => input[1].content =>
  {"input": [{"type": "reasoning"}, {"role": "user", "content": 5}]}
/v1/responses => input[1].role =>
  {"instructions": "a", "input": [{"role": "user", "content": "a"}, {"role": "x", "content": "a"}]}
/v1/responses => input[1].tool_calls[0].function.arguments => {"input": [{"role": "user",
  "content": "a"}, {"type": "function_call", "name": "f", "arguments": "[1]"}]}
/v1/responses => input[0].content => {"input": [{"type": "function_call_output"}]}
/v1/responses => instructions => {"input": [{"role": "developer",
  "content": [{"type": "input_image"}]}, {"role": "user", "content": "a"}]}
/tokenize => content => {}
/detokenize => tokens => {"tokens": [-1]}
/tokenize => content => {"content": "\ud800"}
/apply-template => messages => {"messages": [{"role": "user", "content": "\ud800"}]}
/v1/completions => prompt => {"prompt": ["a", "\ud800"]}
/v1/responses => input => {"input": "\ud800"}
/v1/responses => instructions => {"input": "a", "instructions": "\ud800"}
/apply-template => messages => {}
"""


@pytest.mark.parametrize(
    "path, param, body",
    [
        *((path, param, json.loads(body)) for path, param, body in rows_of(OTHERS)),
        ("/tokenize", "content", {"content": "a" * ((1 << 20) + 1)}),
        ("/detokenize", "tokens", {"tokens": [1] * ((1 << 17) + 1)}),
    ],
)
def test_other_paths_refuse_wrong_values_too(served, path, param, body):
    status, answer = served.ask(path, body)
    assert status == 400 and answer["error"]["param"] == param, answer
    assert path != "/v1/responses" or "messages[" not in answer["error"]["message"]

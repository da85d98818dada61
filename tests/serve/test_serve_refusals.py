"""Values that the server refuses, and the field that each error names."""

import pytest
from serving import SAID, TOOL, Served

pytest_plugins = ("serve_fixtures",)


@pytest.fixture(scope="module")
def served(model):
    with Served(model, "--parallel", "1") as served:
        yield served


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"messages": "Hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        *(
            ({name: value}, name)
            for name, value in (
                ("dry_sequence_breakers", ["\ud800"]),
                ("stop", "a\udfff"),
                ("stop", ["\udc00\ud800"]),
                ("logit_bias", [["\ud800", 1]]),
                ("grammar", 'root ::= "\ud800"'),
                ("user", "\ud800"),
                ("json_schema", {"enum": ["\ud800"]}),
                ("json_schema", {"properties": {"\ud800": {}}}),
                (
                    "tools",
                    [{"type": "function", "function": {"name": "f", "description": "\ud800"}}],
                ),
                ("chat_template_kwargs", {"a": "\ud800"}),
                ("samplers", ["\ud800"]),
                ("metadata", {"\ud800": 1}),
                ("dry_multiplier", "\ud800"),
            )
        ),
        *(
            (
                {
                    "messages": [
                        {
                            "role": "assistant",
                            "tool_calls": [{"function": {"name": "f", "arguments": wrong}}],
                        }
                    ]
                },
                "messages[0].tool_calls[0].function.arguments",
            )
            for wrong in ("{", "nonsense", "[1]", '{"a": NaN}', '{"a": 1e400}', '"\\ud800"')
        ),
        ({"\ud800": 1}, "?"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 1e999}, None),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": -(10**400)}, "temperature"),
        ({"top_p": 10**400}, "top_p"),
        ({"top_k": 10**400}, "top_k"),
        ({"seed": 10**400}, "seed"),
        ({"timeout": 10**400}, "timeout"),
        ({"top_p": 2}, "top_p"),
        ({"typical_p": 7}, "typical_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 1 << 64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"logit_bias": [["a" * 257, 1]]}, "logit_bias"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1e308}, "timeout"),
        ({"samplers": ["top_q"]}, "samplers"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"json_schema": {"type": "object", "not": {}}}, "json_schema"),
        ({"json_schema": {"description": "x" * (64 << 10)}}, "json_schema"),
        ({"grammar": "root ::= oops"}, "grammar"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        *(
            ({"tools": [TOOL], "tool_choice": choice}, "tool_choice")
            for choice in (
                "any",
                5,
                {},
                {"type": "function"},
                {"type": "function", "function": {"name": "g"}},
                {"type": "function", "function": {"name": 5}},
                {"type": "allowed_tools"},
                {"type": "allowed_tools", "mode": "required", "tools": []},
                {"type": "allowed_tools", "mode": "some", "tools": [TOOL]},
            )
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "\ud800"}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"tools": [TOOL], "tool_choice": "required", "json_schema": {}}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages"),
    ],
)
def test_wrong_values_are_refused(served, fields, param):
    status, answer = served.ask("/v1/chat/completions", {"messages": SAID, **fields})
    assert status == 400, answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param, error
    assert error["code"] and error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    "raw, status",
    [
        ("", 400),
        ("{", 400),
        ("[]", 400),
        ("null", 400),
        ('"a"', 400),
        ('{"n": NaN}', 400),
        (b"\xff{}", 400),
        ("[" * 100_000, 400),
        ('{"a":' * 5000 + "1" + "}" * 5000, 400),
        ('{"messages": [' + "[" * 100 + "]" * 100 + "]}", 400),
        ('{"seed": ' + "9" * 10_000 + "}", 400),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_invalid_json_is_refused(served, path, raw, status):
    found, answer = served.ask(path, raw=raw, method="POST")
    assert found == status and answer["error"]["type"] == "invalid_request_error"
    assert "recursion" not in answer["error"]["message"]


def test_a_text_part_without_text_is_not_called_a_picture(served):
    part = {"type": "text", "text": 5}
    body = {"messages": [{"role": "user", "content": [part]}]}
    status, answer = served.ask("/v1/chat/completions", body)
    assert status == 400 and "whose text is missing or not a string" in answer["error"]["message"]


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [99999]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "a", "echo": True, "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/responses", {}, "input"),
        ("/v1/responses", {"input": "a", "previous_response_id": "r"}, "previous_response_id"),
        ("/v1/responses", {"input": "a", "background": True}, "background"),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}, "input[0]"),
        (
            "/v1/responses",
            {"input": [{"type": "reasoning"}, {"role": "user", "content": 5}]},
            "input[1].content",
        ),
        (
            "/v1/responses",
            {
                "instructions": "a",
                "input": [{"role": "user", "content": "a"}, {"role": "x", "content": "a"}],
            },
            "input[1].role",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": "a"},
                    {"type": "function_call", "name": "f", "arguments": "[1]"},
                ]
            },
            "input[1].tool_calls[0].function.arguments",
        ),
        ("/v1/responses", {"input": [{"type": "function_call_output"}]}, "input[0].content"),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "developer", "content": [{"type": "input_image"}]},
                    {"role": "user", "content": "a"},
                ]
            },
            "instructions.content",
        ),
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a" * ((1 << 20) + 1)}, "content"),
        ("/detokenize", {"tokens": [1] * ((1 << 17) + 1)}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/tokenize", {"content": "\ud800"}, "content"),
        ("/apply-template", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ("/v1/completions", {"prompt": ["a", "\ud800"]}, "prompt"),
        ("/v1/responses", {"input": "\ud800"}, "input"),
        ("/v1/responses", {"input": "a", "instructions": "\ud800"}, "instructions"),
        ("/apply-template", {}, "messages"),
    ],
)
def test_other_paths_refuse_wrong_values_too(served, path, body, param):
    status, answer = served.ask(path, body)
    assert status == 400 and answer["error"]["param"] == param, answer
    assert path != "/v1/responses" or "messages[" not in answer["error"]["message"]

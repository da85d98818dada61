"""Tool calls as models of each family write them, independent of the product's own writer; and
ways to read an answer."""

import json
import re

from serving import TOKENIZER
from tokenizers import Tokenizer

from hotsplit.runtime.answers.answer_reader import CallRules
from hotsplit.runtime.answers.formats import FORMATS
from hotsplit.runtime.generate.generation import Token
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.serve.answers import Output, Voice
from hotsplit.serve.text_requests import Syntax

BY_NAME = {known.name: known for known in FORMATS}
ONE = {"name": "f", "arguments": {"a": 1}}
TWO = {"name": "g", "arguments": {"b": "</x>"}}
TAGS = {"name": "f", "arguments": {"a": 'x</tool_call>"}} [TOOL_CALLS]<|end|></parameter> \\'}}
NOTHING = {"name": "f", "arguments": {}}
STRINGS = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
TOOLS = {"f": {}, "g": STRINGS}
RULES = CallRules(tools=TOOLS)
BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEP = "<\uff5ctool\u2581sep\uff5c>"


def bare(value):
    """A value as Gemma 4 writes it, without JSON's quotes."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        keys = [key if re.fullmatch(r"\w+", key) else bare(key) for key in value]
        parts = zip(keys, map(bare, value.values()), strict=True)
        return "{" + ",".join(f"{key}:{part}" for key, part in parts) + "}"
    return f"[{','.join(map(bare, value))}]" if isinstance(value, list) else json.dumps(value)


def plain(value):
    return value if isinstance(value, str) else json.dumps(value)


def tagged(call, key_tag, value_tag, end):
    """Arguments between tags, whose strings have no quotes."""
    return "".join(
        f"{key_tag.format(key)}{value_tag}{plain(value)}{end}"
        for key, value in call["arguments"].items()
    )


def in_python(call):
    given = (f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in call["arguments"].items())
    return f"{call['name']}({', '.join(given)})"


def given_to(call):
    return json.dumps(call["arguments"])


def of_qwen(call):
    written = tagged(call, "<parameter={}>", "\n", "\n</parameter>\n")
    return f"<tool_call>\n<function={call['name']}>\n{written}</function>\n</tool_call>"


def of_glm(call, line="\n"):
    written = tagged(call, f"<arg_key>{{}}</arg_key>{line}", "<arg_value>", f"</arg_value>{line}")
    return f"<tool_call>{call['name']}{line}{written}</tool_call>"


def of_cohere(call):
    named = {"tool_name": call["name"], "parameters": call["arguments"]}
    return json.dumps({"tool_call_id": "0", **named})


def of_gpt_oss(call):
    head = f"<|channel|>commentary to=functions.{call['name']} <|constrain|>json<|message|>"
    return f"{head}{given_to(call)}<|call|>"


def writer(each, before="", joint="", behind=""):
    """A function that writes calls; `each` writes one of them."""
    return lambda *calls: before + joint.join(map(each, calls)) + behind


WRITERS = {
    "Hermes": writer(lambda c: f"<tool_call>\n{json.dumps(c)}\n</tool_call>", joint="\n"),
    "Llama 3": writer(
        lambda c: json.dumps({"name": c["name"], "parameters": c["arguments"]}), joint="; "
    ),
    "Qwen-Coder": writer(of_qwen, joint="\n"),
    "DeepSeek": writer(
        lambda c: f"{CALL}function{SEP}{c['name']}\n```json\n{given_to(c)}\n```{CALL_END}",
        *(BEGIN, "\n", END),
    ),
    "DeepSeek 3.1": writer(
        lambda c: f"{CALL}{c['name']}{SEP}{given_to(c)}{CALL_END}", before=BEGIN, behind=END
    ),
    "Mistral": writer(json.dumps, "[TOOL_CALLS] [", ", ", "]"),
    "Mistral, newer": writer(lambda c: f"[TOOL_CALLS]{c['name']}[ARGS]{given_to(c)}"),
    "Granite": writer(json.dumps, "<|tool_call|>[", ", ", "]"),
    "gpt-oss": writer(of_gpt_oss, joint="<|start|>assistant"),
    "Apriel": writer(json.dumps, "<tool_calls>[", ", ", "]</tool_calls>"),
    "Gemma 4": writer(lambda c: f"<|tool_call>call:{c['name']}{bare(c['arguments'])}<tool_call|>"),
    "GLM-4.5": writer(of_glm, joint="\n"),
    "GLM-4.7": writer(lambda c: of_glm(c, line="")),
    "Cohere 2": writer(of_cohere, "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
    "OLMo 3": writer(in_python, "<function_calls>", "\n", "</function_calls>"),
}
AS_TEXT = ("Qwen-Coder", "GLM-4.5", "GLM-4.7")  # values are text, whose types a schema tells


def calls_of(*calls):
    return [(call["name"], call["arguments"]) for call in calls]


def marked_codec(has_marks=True):
    """A codec that has all marks of all formats as special tokens, or as text."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    if has_marks:
        tokenizer.add_special_tokens(sorted({mark for known in FORMATS for mark in known.marks}))
    return TextCodec(tokenizer, None, frozenset({0}))


def syntax(name, **fields):
    rules = CallRules(tools=TOOLS, **fields)
    return Syntax(format=BY_NAME[name], rules=rules, splits_reasoning=True)


def pieces_of(text, size):
    return [text[n : n + size] for n in range(0, len(text), size)]


def output_of(syntax, pieces):
    """What a server makes of an answer that arrives in these pieces."""
    voice, output = Voice(syntax), Output()
    for piece in pieces:
        output.add(voice.say([Token(5, piece)]))
    output.add(voice.finish())
    return output


def read(reader, pieces, is_cut=False):
    """(content, reasoning, calls, all text of the parts)."""
    parts = [part for piece in pieces for part in reader.push(piece)]
    parts += reader.flush(is_cut=is_cut)
    content, reasoning = (
        "".join(part.text for part in parts if part.kind == kind)
        for kind in ("content", "reasoning")
    )
    calls = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
    return content, reasoning, calls, "".join(part.text for part in parts)

"""Chat templates in the style of the model families that they are named after, one with further
features ("controls"), and messages for them.

Together they use what published templates use: macros, namespaces, tools as JSON, loop controls,
whitespace control by hand or by trim_blocks, slices, reversed loops, dates, exceptions."""

from paths import TESTS

FOLDER = TESTS / "text" / "templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
CHATML, GEMMA, LLAMA2 = (TEMPLATES[name] for name in ("chatml", "gemma", "llama2"))
LLAMA3, MISTRAL, ZEPHYR = (TEMPLATES[name] for name in ("llama3", "mistral", "zephyr"))
DEEPSEEK, QWEN_TOOLS = TEMPLATES["deepseek"], TEMPLATES["qwen-tools"]
QWEN_REASONING = TEMPLATES["qwen-reasoning"]

USER = {"role": "user", "content": 'What is 2 + 2?\n  \u00e9 \U0001f98a <b> & "q"'}
ANSWER = {"role": "assistant", "content": " It is 4. "}
AGAIN = {"role": "user", "content": "And 3 + 3? <|im_end|> </s>"}
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nTwo and two...\n</think>\n\nIt is 4."}
_GIVEN = {"city": "K\u00f6ln", "days": [1, 2.5]}
_CALL = {"id": "abcdef123", "type": "function"} | {
    "function": {"name": "weather", "arguments": _GIVEN}
}
CALL = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
RESULT = {"role": "tool", "content": '{"sky": "grey & wet"}', "tool_call_id": "abcdef123"}
_APART = {"role": "assistant", "content": "4.", "reasoning": "Two and two..."}
MESSAGES = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "three": [USER, ANSWER, AGAIN],
    "four": [SYSTEM, USER, ANSWER, AGAIN],
    "answered": [SYSTEM, USER, ANSWER],
    "five": [SYSTEM, USER, ANSWER, AGAIN, ANSWER, USER],
    "reasoning": [USER, THOUGHT, AGAIN],
    "reasoning apart": [USER, _APART],
    "tools": [USER, CALL, RESULT],
    "wrong order": [USER, USER],
    "empty": [{"role": "user", "content": ""}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
}
_WEATHER = {"name": "weather", "description": "The weather, <now> & \u00e9"}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {**_WEATHER, "parameters": _CITY}}]

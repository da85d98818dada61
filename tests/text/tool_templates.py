"""Chat templates with tools, short ones in the style of published ones: what each says of calls is
what the server reads."""

from chat_templates import LLAMA3, MISTRAL, QWEN_TOOLS

from hotsplit.runtime.answers.call_style import CallStyle

_HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
_TAIL = "{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
_TEXT = "{{ message.role + ':' + message.content + '\\n' }}"


def _template(calls, head="", otherwise=_TEXT):
    return (
        f"{head}{_HEAD}{{% if message.tool_calls %}}{{% for call in message.tool_calls %}}"
        f"{{% set f = call.function %}}{calls}{{% endfor %}}"
        f"{{% else %}}{otherwise}{{% endif %}}{_TAIL}"
    )


_NINE = (
    "{% if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}"
)
_NINE_RESULT = (
    "{% if message.tool_call_id is defined and message.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}" + _TEXT
)
MISTRAL_NINE = _template(
    _NINE + '[TOOL_CALLS] [{{ (f | tojson)[:-1] }}, "id": "{{ call.id }}"}]</s>',
    otherwise=_NINE_RESULT,
)
MISTRAL_NEWER = _template(
    _NINE + "{{ '[TOOL_CALLS]' + f.name + '[CALL_ID]' + call.id + '[ARGS]' + f.arguments"
    " if f.arguments is string else '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}",
    otherwise=_NINE_RESULT,
)
DEEPSEEK = _template(
    "{{ '<\uff5ctool\u2581call\u2581begin\uff5c>' + call.type + '<\uff5ctool\u2581sep\uff5c>'"
    " + f.name + '\\n```json\\n' + f.arguments + '\\n```<\uff5ctool\u2581call\u2581end\uff5c>' }}"
)
# Writes calls only of messages whose content is null.
DEEPSEEK_NULL = _template(
    "{% if message.content is none %}{{ '<\uff5ctool\u2581call\u2581begin\uff5c>' + f.name"
    " + '<\uff5ctool\u2581sep\uff5c>' + f.arguments }}{% endif %}"
)
PRINTED = _template('<tool_call>{"name": {{ f.name }}, "arguments": {{ f.arguments }}}')
QWEN_CODER = _template(
    "{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}"
    "{% for key, value in f.arguments.items() %}{{ '<parameter=' + key + '>\\n' }}"
    "{{ value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>\\n' }}"
)
GRANITE = _template("{{ '<|tool_call|>' + [{'name': f.name, 'arguments': f.arguments}] | tojson }}")
# Granite 3.3's: calls in earlier messages are left out.
NO_CALLS = f"{{{{ '<|tool_call|>' if false }}}}{_HEAD}{_TEXT}{_TAIL}"
GPT_OSS = _template(
    "{{ '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>'"
    " + f.arguments | tojson + '<|call|>' }}"
)

# Gemma 4's first template: arguments without quotes, results in the message with the calls.
GEMMA = _template(
    "{{ '<|tool_call>call:' + f.name + '{' }}{% for key, value in f.arguments.items() %}"
    "{{ key + ':' + ('<|\"|>' + value + '<|\"|>' if value is string else value | tojson) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}<tool_call|>' }}"
    "{% if loop.last and message.tool_responses %}{% for found in message.tool_responses %}"
    "{{ '<|tool_response>response:' + found.name + '{' + found.response + '}<tool_response|>' }}"
    "{% endfor %}{{ message.content }}{% endif %}"
)
GLM = _template(
    "{{ '<tool_call>' + f.name }}{% for key, value in f.arguments.items() %}"
    "{{ '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
    "{{ value if value is string else value | tojson(ensure_ascii=False) }}"
    "{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}"
)
COHERE = _template(
    '{{ \'<|CHATBOT_TOKEN|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "\' }}'
    '{{ f.name + \'", "parameters": \' }}{{ f.arguments | tojson }}}]<|END_ACTION|>'
)

TEXT_STYLE = CallStyle(has_text_arguments=True)
SHORT_STYLE = CallStyle(has_short_ids=True)
# The template, the name of its format and its style.
CALL_TEMPLATES = {
    "qwen": (QWEN_TOOLS, "Hermes", CallStyle()),
    "llama": (LLAMA3, "Llama 3", CallStyle(has_single_calls=True)),
    "mistral": (MISTRAL, "Mistral", CallStyle()),
    "mistral, nine": (MISTRAL_NINE, "Mistral", SHORT_STYLE),
    "mistral, newer": (MISTRAL_NEWER, "Mistral, newer", SHORT_STYLE),
    "deepseek": (DEEPSEEK, "DeepSeek", TEXT_STYLE),
    "deepseek, null": (
        DEEPSEEK_NULL,
        "DeepSeek 3.1",
        CallStyle(has_text_arguments=True, has_null_content=True),
    ),
    "printed": (PRINTED, "Hermes", TEXT_STYLE),
    "qwen-coder": (QWEN_CODER, "Qwen-Coder", CallStyle()),
    "granite": (GRANITE, "Granite", CallStyle()),
    "no calls": (NO_CALLS, "Granite", CallStyle(has_calls_as_content=True)),
    "gemma": (GEMMA, "Gemma 4", CallStyle(has_responses_in_calls=True)),
    "glm": (GLM, "GLM-4.5", CallStyle()),
    "cohere": (COHERE, "Cohere 2", CallStyle()),
    "gpt-oss": (GPT_OSS, "gpt-oss", CallStyle()),
}

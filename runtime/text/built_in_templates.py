"""Named chat templates, for model files that have none.

They render messages as the templates in the tokenizer_config.json of the original models do, except
that Gemma's and Mistral's accept a system message, which is put into the first user message."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltInTemplate:
    text: str
    turn_end: str | None = None  # the token that ends an answer, if it is not the model's eos


_ALTERNATE = """\
{%- macro check(role, index) %}
{%- if (role == 'user') != (index % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- endmacro %}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}
{%- set turns = messages[1:] %}
{%- else %}
{%- set system = '' %}
{%- set turns = messages %}
{%- endif %}
"""

_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_LLAMA2 = (
    _ALTERNATE
    + """\
{%- for message in turns %}
{{- check(message['role'], loop.index0) }}
{%- set content = message['content'] %}
{%- if loop.first and system %}
{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + content %}
{%- endif %}
{%- if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- else %}
{{- ' ' + content.strip() + ' ' + eos_token }}
{%- endif %}
{%- endfor %}"""
)

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_MISTRAL = (
    _ALTERNATE
    + """\
{{- bos_token }}
{%- for message in turns %}
{{- check(message['role'], loop.index0) }}
{%- if message['role'] == 'user' %}
{{- '[INST] ' + (system + '\\n\\n' if loop.first and system else '') }}
{{- message['content'] + ' [/INST]' }}
{%- else %}
{{- message['content'] + eos_token }}
{%- endif %}
{%- endfor %}"""
)

_GEMMA = (
    _ALTERNATE
    + """\
{{- bos_token }}
{%- for message in turns %}
{{- check(message['role'], loop.index0) }}
{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{{- system + '\\n\\n' if loop.first and system else '' }}
{{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}"""
)

_ZEPHYR = """\
{%- for message in messages %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}"""

BUILT_IN = {
    "chatml": BuiltInTemplate(_CHATML, "<|im_end|>"),
    "llama2": BuiltInTemplate(_LLAMA2),
    "llama3": BuiltInTemplate(_LLAMA3, "<|eot_id|>"),
    "mistral": BuiltInTemplate(_MISTRAL),
    "gemma": BuiltInTemplate(_GEMMA, "<end_of_turn>"),
    "zephyr": BuiltInTemplate(_ZEPHYR),
}

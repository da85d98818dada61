"""What models of many families write after the prompt, with short chat templates in the style of
the published ones: each has the marks by which the published template is known, and its prompt."""

from dataclasses import dataclass

BEGIN, CALL = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A template and the model's marks. `form`: the format that the template has. `says`: what it
    says of calls; without it, it has no tools. `header`: the end of the prompt; behind it `on`, or
    `off` if thinking is off. `think`: the marks around reasoning; None if the model does not
    reason. `answer`: those around the answer behind it. `calls`: the form of the calls, if it is
    not `form`."""

    form: str
    says: str = ""
    header: str = "<|im_start|>assistant\n"
    on: str = ""
    off: str = ""
    think: tuple[str, str] | None = None
    answer: tuple[str, str] = ("", "")
    calls: str = ""

    @property
    def template(self) -> str:
        quoted = [text.replace("\n", "\\n") for text in (self.header, self.off, self.on)]
        header, off, on = (f"{{{{ '{text}' }}}}" for text in quoted)
        says = f"{{% raw %}}{self.says}{{% endraw %}}{{{{ tools | tojson }}}}"
        return (
            (f"{{% if tools %}}{says}{{% endif %}}" if self.says else "")
            + "{% for message in messages %}{{ message.role + ':' + message.content + '\\n' }}"
            + "{% endfor %}{% if add_generation_prompt %}"
            + header
            + "{% if enable_thinking is defined and not enable_thinking %}"
            + f"{off}{{% else %}}{on}{{% endif %}}{{% endif %}}"
        )


THINK = ("<think>\n", "\n</think>\n\n")
BRACKETS = ("[THINK]", "[/THINK]")
CHANNEL = ("<|channel>thought\n", "<channel|>")
THINKING = ("<|START_THINKING|>", "<|END_THINKING|>")
HERMES = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
CODER = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
LLAMA = '{"name": function name, "parameters": dictionary}<|start_header_id|>'
LISTED = '<|tool_call|>[{"name": "f", "arguments": {}}]'
NEWER = "[TOOL_CALLS]f[ARGS]{}"
GLM = "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
GLM_47 = GLM.replace("\n", "")
GEMMA = "<|tool>declaration:f{}<tool|><|tool_call>call:f{}<tool_call|>"
ACTION = '<|CHATBOT_TOKEN|><|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>'
CHATBOT = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
MODEL = "<|turn>model\n"
PUBLISHED = {
    "Llama 2": Published(form="described", header="[/INST]"),
    "Llama 3.1": Published(
        form="Llama 3", says=LLAMA, header="<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "DeepSeek-R1-Distill-Llama": Published(
        form="DeepSeek",
        says=f"{BEGIN}{CALL}```json",
        header="<\uff5cAssistant\uff5c>",
        on="<think>\n",
        think=THINK,
    ),
    "Mistral 7B v0.3": Published(form="Mistral", says="[TOOL_CALLS] [{}]", header="[/INST]"),
    "Mistral Small 3.2": Published(form="Mistral, newer", says=NEWER, header="[/INST]"),
    "Magistral": Published(form="Mistral, newer", says=NEWER, header="[/INST]", think=BRACKETS),
    "Ministral 3 Reasoning": Published(
        form="Mistral, newer", says=f"[THINK]...[/THINK]{NEWER}", header="[/INST]", think=BRACKETS
    ),
    "Mixtral": Published(form="described", header=" [/INST]"),
    "Qwen 2": Published(form="described"),
    "Qwen 2.5": Published(form="Hermes", says=HERMES),
    "Qwen 3": Published(form="Hermes", says=HERMES, off="<think>\n\n</think>\n\n", think=THINK),
    "Qwen 3 Thinking": Published(form="Hermes", says=HERMES, on="<think>\n", think=THINK),
    "QwQ": Published(form="Hermes", says=HERMES, on="<think>\n", think=THINK),
    "Qwen3-Next Thinking": Published(form="Hermes", says=HERMES, on="<think>\n", think=THINK),
    "Qwen3-Coder": Published(form="Qwen-Coder", says=CODER),
    "Qwen 3.5": Published(
        form="Qwen-Coder", says=CODER, on="<think>\n", off="<think>\n\n</think>\n\n", think=THINK
    ),
    "Gemma 2": Published(form="described", header="<start_of_turn>model\n"),
    "Gemma 3": Published(form="described", header="<start_of_turn>model\n"),
    "Gemma 4": Published(
        form="Gemma 4", says=GEMMA, header=MODEL, off="<|channel>thought\n<channel|>", think=CHANNEL
    ),
    "Gemma 4, a block that the prompt opens": Published(
        form="Gemma 4", says=GEMMA, header=MODEL, on="<|channel>thought\n", think=CHANNEL
    ),
    "SmolLM3": Published(form="Hermes", says=HERMES, off="<think>\n\n</think>\n", think=THINK),
    "OLMo 2": Published(form="described", header="<|assistant|>\n"),
    "OLMo 3": Published(form="OLMo 3", says="<function_calls>\nf(a=1)\n</function_calls>"),
    "OLMo 3 Think": Published(form="described", on="<think>", think=("<think>", "</think>\n")),
    "EXAONE 4": Published(
        form="Hermes",
        says=HERMES,
        header="[|assistant|]\n",
        on="<think>\n",
        think=THINK,
        off="<think>\n\n</think>\n\n",
    ),
    "ERNIE 4.5 Thinking": Published(
        form="ERNIE 4.5",
        says=f"<response>{HERMES}",
        on="<think>\n",
        think=THINK,
        answer=("<response>\n", "\n</response>\n"),
    ),
    "GLM-4": Published(form="described", header="<|assistant|>\n"),
    "GLM-Z1": Published(form="described", header="<|assistant|>\n", on="<think>\n", think=THINK),
    "GLM-4.5": Published(
        form="GLM-4.5",
        says=GLM,
        header="<|assistant|>",
        off="\n<think></think>",
        think=("\n<think>", "</think>\n"),
    ),
    "GLM-4.7": Published(
        form="GLM-4.7",
        says=GLM_47,
        header="<|assistant|>",
        on="<think>",
        off="</think>",
        think=("<think>", "</think>"),
    ),
    "Granite 3.1": Published(form="Granite", says=LISTED),
    "Granite 3.2": Published(
        form="Granite 3.2",
        says=f"Here is my thought process: Here is my response: {LISTED}",
        think=("Here is my thought process:\n", "\nHere is my response:\n"),
        calls="Granite",
    ),
    "Granite 3.3": Published(
        form="Granite",
        says=LISTED,
        think=("<think>", "</think>\n"),
        answer=("<response>", "</response>"),
    ),
    "Granite 4": Published(form="Hermes", says=HERMES),
    "Falcon 3": Published(form="described", header="<|assistant|>\n"),
    "Phi-3.5": Published(form="described", header="<|assistant|>\n"),
    "Phi-4-mini": Published(form="Granite", says="<|tool_call|>", header="<|assistant|>"),
    "Phi-4-mini Reasoning": Published(form="described", header="<|assistant|>", think=THINK),
    "StarCoder 2": Published(form="described", header="### Response\n"),
    "Command R": Published(form="described", header=CHATBOT),
    "Command R7B": Published(
        form="Cohere 2",
        says=ACTION,
        header=CHATBOT,
        think=THINKING,
        off="<|START_THINKING|><|END_THINKING|>",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "Command A Reasoning": Published(
        form="Cohere 2",
        says=ACTION,
        header=CHATBOT,
        on="<|START_THINKING|>",
        off="<|START_THINKING|><|END_THINKING|>",
        think=THINKING,
        answer=("<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "gpt-oss": Published(
        form="gpt-oss",
        says="<|channel|>commentary<|message|>",
        header="<|start|>assistant",
        think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        answer=("<|channel|>final<|message|>", "<|return|>"),
    ),
    "Nemotron Mini": Published(form="described", header="<extra_id_1>Assistant\n"),
    "Nemotron 3 Nano": Published(
        form="Qwen-Coder", says=CODER, on="<think>\n", off="<think></think>", think=THINK
    ),
    "SmallThinker": Published(form="Hermes", says=HERMES, think=THINK),
    "Arcee AFM": Published(form="Hermes", says=HERMES),
    "TurboSparse": Published(form="described"),
}

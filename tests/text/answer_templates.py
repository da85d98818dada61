"""What models of many families write after the prompt, with short chat templates in the style of
the published ones: each has the marks by which the published template is known, and its prompt."""

from dataclasses import dataclass
from typing import Any

from case_tables import rows_of

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


HERMES = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
CODER = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
LLAMA = '{"name": function name, "parameters": dictionary}<|start_header_id|>'
LISTED = '<|tool_call|>[{"name": "f", "arguments": {}}]'
NEWER = "[TOOL_CALLS]f[ARGS]{}"
GLM = "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
GLM_47 = GLM.replace("\n", "")
GEMMA = "<|tool>declaration:f{}<tool|><|tool_call>call:f{}<tool_call|>"
ACTION = '<|CHATBOT_TOKEN|><|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>'
SAID = {"HERMES": HERMES, "CODER": CODER, "LLAMA": LLAMA, "LISTED": LISTED, "NEWER": NEWER}
SAID |= {"GLM": GLM, "GLM_47": GLM_47, "GEMMA": GEMMA, "ACTION": ACTION, "": ""}
SAID |= {"DEEPSEEK": f"{BEGIN}{CALL}```json", "MISTRAL": "[TOOL_CALLS] [{}]"}
SAID |= {"THINKS": f"[THINK]...[/THINK]{NEWER}", "ERNIE": f"<response>{HERMES}"}
SAID |= {"OLMO": "<function_calls>\nf(a=1)\n</function_calls>", "PHI": "<|tool_call|>"}
SAID |= {"CHANNELS": "<|channel|>commentary<|message|>"}
SAID["GRANITE"] = f"Here is my thought process: Here is my response: {LISTED}"
# One of each kind, as other families answer as one of these: name, form, what it says of calls, and
# the other fields. \\n is a line end.
TABLE = r"""
Llama 2 => described =>  => header=[/INST]
Llama 3.1 => Llama 3 => LLAMA => header=<|start_header_id|>assistant<|end_header_id|>\n\n
DeepSeek-R1-Distill-Llama => DeepSeek => DEEPSEEK => header=<｜Assistant｜> ; on=<think>\n ;
  think=<think>\n , \n</think>\n\n
Mistral 7B v0.3 => Mistral => MISTRAL => header=[/INST]
Mistral Small 3.2 => Mistral, newer => NEWER => header=[/INST]
Ministral 3 Reasoning => Mistral, newer => THINKS => header=[/INST] ; think=[THINK] , [/THINK]
Qwen 2.5 => Hermes => HERMES =>
Qwen 3 => Hermes => HERMES => off=<think>\n\n</think>\n\n ; think=<think>\n , \n</think>\n\n
Qwen 3 Thinking => Hermes => HERMES => on=<think>\n ; think=<think>\n , \n</think>\n\n
Qwen3-Coder => Qwen-Coder => CODER =>
Qwen 3.5 => Qwen-Coder => CODER => on=<think>\n ; off=<think>\n\n</think>\n\n ;
  think=<think>\n , \n</think>\n\n
Gemma 4 => Gemma 4 => GEMMA => header=<|turn>model\n ; off=<|channel>thought\n<channel|> ;
  think=<|channel>thought\n , <channel|>
Gemma 4, a block that the prompt opens => Gemma 4 => GEMMA => header=<|turn>model\n ;
  on=<|channel>thought\n ; think=<|channel>thought\n , <channel|>
SmolLM3 => Hermes => HERMES => off=<think>\n\n</think>\n ; think=<think>\n , \n</think>\n\n
OLMo 3 => OLMo 3 => OLMO =>
OLMo 3 Think => described =>  => on=<think> ; think=<think> , </think>\n
EXAONE 4 => Hermes => HERMES => header=[|assistant|]\n ; on=<think>\n ;
  off=<think>\n\n</think>\n\n ; think=<think>\n , \n</think>\n\n
ERNIE 4.5 Thinking => ERNIE 4.5 => ERNIE => on=<think>\n ; think=<think>\n , \n</think>\n\n ;
  answer=<response>\n , \n</response>\n
GLM-Z1 => described =>  => header=<|assistant|>\n ; on=<think>\n ;
  think=<think>\n , \n</think>\n\n
GLM-4.5 => GLM-4.5 => GLM => header=<|assistant|> ; off=\n<think></think> ;
  think=\n<think> , </think>\n
GLM-4.7 => GLM-4.7 => GLM_47 => header=<|assistant|> ; on=<think> ; off=</think> ;
  think=<think> , </think>
Granite 3.1 => Granite => LISTED =>
Granite 3.2 => Granite 3.2 => GRANITE => calls=Granite ;
  think=Here is my thought process:\n , \nHere is my response:\n
Granite 3.3 => Granite => LISTED => think=<think> , </think>\n ; answer=<response> , </response>
Phi-4-mini => Granite => PHI => header=<|assistant|>
Command R7B => Cohere 2 => ACTION => header=<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|> ;
  off=<|START_THINKING|><|END_THINKING|> ; think=<|START_THINKING|> , <|END_THINKING|> ;
  answer=<|START_RESPONSE|> , <|END_RESPONSE|>
Command A Reasoning => Cohere 2 => ACTION => header=<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|> ;
  on=<|START_THINKING|> ; off=<|START_THINKING|><|END_THINKING|> ;
  think=<|START_THINKING|> , <|END_THINKING|> ; answer=<|START_TEXT|> , <|END_TEXT|>
gpt-oss => gpt-oss => CHANNELS => header=<|start|>assistant ;
  think=<|channel|>analysis<|message|> , <|end|><|start|>assistant ;
  answer=<|channel|>final<|message|> , <|return|>
Nemotron 3 Nano => Qwen-Coder => CODER => on=<think>\n ; off=<think></think> ;
  think=<think>\n , \n</think>\n\n
SmallThinker => Hermes => HERMES => think=<think>\n , \n</think>\n\n
"""


def published(form: str, says: str, fields: str) -> Published:
    """A row of the table."""
    given: dict[str, Any] = {}
    for name, value in (field.split("=", 1) for field in fields.split(" ; ") if field):
        texts = [text.replace(r"\n", "\n") for text in value.split(" , ")]
        given[name] = tuple(texts) if name in ("think", "answer") else texts[0]
    return Published(form=form, says=SAID[says], **given)


PUBLISHED = {name: published(*row) for name, *row in rows_of(TABLE)}

"""Chat templates: render the messages of a conversation to the text that a model was trained to
continue.

    template = chat_template_of(engine.model, engine.codec)
    text = template.render([{"role": "user", "content": "Hello"}])
    ids = engine.codec.encode_rendered(text)

A template is the model file's own, one of its named ones, a built-in one or read from a file. The
output equals that of transformers' apply_chat_template. Templates run in a separate process
(template_process)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import Keys

from hotsplit.artifacts.model_file import TEMPLATE_KEY, TEMPLATES_KEY, ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.json_file import read_text
from hotsplit.runtime.text.built_in_templates import BUILT_IN
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.runtime.text.template_process import TemplateProcess

Message = Mapping[str, object]  # "role", "content", and other keys that a template may read

DEFAULT, TOOL_USE = "default", "tool_use"
# Names of tokens in templates -> keys of their ids in a model file.
_SPECIAL = {
    "bos_token": Keys.Tokenizer.BOS_ID,
    "eos_token": Keys.Tokenizer.EOS_ID,
    "unk_token": Keys.Tokenizer.UNK_ID,
    "pad_token": Keys.Tokenizer.PAD_ID,
}
# transformers' names for reasoning in a message; templates read the first or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_BLOCK = "block['thinking']"  # in templates that read reasoning from a block of the content
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template. `name`: for error messages. `tool_text`: the file's separate template for
    messages with tools. `turn_end`: a token that ends an answer, besides the model's own."""

    name: str
    text: str
    tool_text: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...
    turn_end: str | None = None
    process: TemplateProcess = field(default_factory=TemplateProcess, compare=False, repr=False)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
        keeps_none: bool = False,
    ) -> str:
        """The text of the messages and, with `add_generation_prompt`, of an answer's header.

        Messages of one role in succession are joined if the template refuses them (see turns).
        With `continue_final_message`, the text ends where the last message does, for the model to
        continue. `variables` are further inputs of the template: enable_thinking, documents, ...
        With `keeps_none`, a None in a message reaches the template, unlike in transformers.

        Raises HotsplitError for malformed messages or none, if `add_generation_prompt` and
        `continue_final_message` are both set, and as TemplateProcess.render does."""
        if continue_final_message and add_generation_prompt:
            raise HotsplitError(
                "continue_final_message continues the last message, add_generation_prompt begins"
                " another; ask for one of them"
            )
        known = [_normal(message, keeps_none=keeps_none) for message in messages]
        if not known:
            raise HotsplitError("no messages; a conversation has at least one")
        inputs = {
            **self.special,
            **(variables or {}),
            "tools": None if tools is None else list(tools),
            "documents": (variables or {}).get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        joined = in_turns(known)
        errors = []
        for form in [known, joined] if len(joined) < len(known) else [known]:
            try:
                return self._rendered(form, inputs, is_continued=continue_final_message)
            except HotsplitError as error:
                errors.append(error)
        raise errors[0]

    def close(self) -> None:
        """Ends the rendering process; the next rendering starts a new one."""
        self.process.close()

    def _rendered(
        self, messages: list[dict[str, object]], inputs: Mapping[str, object], *, is_continued: bool
    ) -> str:
        if is_continued:
            messages = [*messages[:-1], _marked(messages[-1])]
        has_tools = inputs["tools"] is not None
        text = self.tool_text if has_tools and self.tool_text is not None else self.text
        if _BLOCK in text and "reasoning_content" not in text:
            messages = [_with_block(message) for message in messages]
        rendered = self.process.render(self.name, text, {**inputs, "messages": messages})
        return self._cut(rendered) if is_continued else rendered

    def _cut(self, rendered: str) -> str:
        """The text before the mark. If a template trims messages, the mark's final space is
        gone."""
        at = rendered.rfind(_MARK.strip())
        if at < 0:
            raise HotsplitError(
                f"{self.name} leaves out the end of the last message, which cannot be continued"
            )
        is_exact = rendered[at : at + len(_MARK)] == _MARK
        return rendered[:at] if is_exact else rendered[:at].rstrip()


def has_template(model: ModelFile) -> bool:
    """True if the file has a chat template, named or not."""
    return TEMPLATE_KEY in model.extra_keys or TEMPLATES_KEY in model.extra_keys


def chat_template_of(model: ModelFile, codec: TextCodec, wanted: str | None = None) -> ChatTemplate:
    """The template of a model file, or the one that `wanted` names: one of the file's named ones, a
    built-in one, or a Jinja file.

    Raises HotsplitError if there is none."""
    special = _special_texts(model, codec)
    found = _named_templates(model)
    if wanted is None:
        if DEFAULT not in found:
            named = f"; its own are named {', '.join(sorted(found))}" if found else ""
            raise HotsplitError(
                f"{model.path}: has no chat template; give --chat-template NAME|FILE, with one of"
                f" {', '.join(BUILT_IN)} or a file of Jinja{named}"
            )
        name = f"{model.path}: its chat template"
        return ChatTemplate(
            name=name, text=found[DEFAULT], tool_text=found.get(TOOL_USE), special=special
        )
    if wanted in found:
        name = f"{model.path}: its chat template {wanted!r}"
        return ChatTemplate(name=name, text=found[wanted], special=special)
    if wanted in BUILT_IN:
        known = BUILT_IN[wanted]
        return ChatTemplate(
            name=f"the chat template {wanted!r}",
            text=known.text,
            special={"bos_token": "", "eos_token": ""} | special,
            turn_end=known.turn_end,
        )
    path = Path(wanted)
    if not _is_file(path):
        names = ", ".join([*BUILT_IN, *sorted(found)])
        raise HotsplitError(
            f"{wanted[:200]}: neither a file nor the name of a chat template; known: {names}"
        )
    text = read_text(path, "chat template (Jinja)")
    return ChatTemplate(name=f"{path}: this chat template", text=text, special=special)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a possible file name
        return False


def _named_templates(model: ModelFile) -> dict[str, str]:
    """The file's templates by name; the unnamed one is the default."""
    texts = {DEFAULT: TEMPLATE_KEY}
    names = model.extra_keys.get(TEMPLATES_KEY)
    if isinstance(names, list):
        texts |= {str(name): f"{TEMPLATE_KEY}.{name}" for name in names}
    found = {name: model.text(key) for name, key in texts.items()}
    return {name: text for name, text in found.items() if text is not None}


def _special_texts(model: ModelFile, codec: TextCodec) -> dict[str, str]:
    numbers = {name: model.extra_keys.get(key) for name, key in _SPECIAL.items()}
    texts = {
        name: codec.tokenizer.id_to_token(int(number))
        for name, number in numbers.items()
        if isinstance(number, np.integer) and 0 <= number < 1 << 31
    }
    return {name: text for name, text in texts.items() if text is not None}


def _normal(message: Message, *, keeps_none: bool) -> dict[str, object]:
    """A message as transformers passes it to a template: without None values, unless
    `keeps_none`, and with reasoning under the names that templates read."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise HotsplitError(
            f"{str(message)[:80]!r} is not a message; wanted an object with role and content"
        )
    known = {key: value for key, value in message.items() if keeps_none or value is not None}
    reasoning = next((r for name in _REASONING if (r := message.get(name)) is not None), None)
    if reasoning is None:
        return known
    return {"thinking": reasoning, **known, "reasoning_content": reasoning}


def _with_block(message: dict[str, object]) -> dict[str, object]:
    """An answer's message with its reasoning as the first block of the content."""
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if message["role"] != "assistant" or not reasoning or not isinstance(content, str):
        return message
    text = [{"type": "text", "text": content}] if content else []
    return message | {"content": [{"type": "thinking", "thinking": reasoning}, *text]}


def _marked(message: dict[str, object]) -> dict[str, object]:
    """The message with a mark at the end of its (last) text."""
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": content + _MARK}
    blocks = list(content) if isinstance(content, Sequence) else []
    for number in reversed(range(len(blocks))):
        block = blocks[number]
        if isinstance(block, Mapping) and isinstance(block.get("text"), str):
            blocks[number] = {**block, "text": f"{block['text']}{_MARK}"}
            return message | {"content": blocks}
    raise HotsplitError("the last message has no text that could be continued")


# ---- messages of one role in succession ---------------------------------------------------------

_JOINED = ("system", "user", "assistant")
_TEXTS = ("content", "reasoning_content", "thinking", "reasoning")


def in_turns(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The messages, of which those of one role in succession are joined, for templates that want
    the roles to alternate: results of tools that are followed by a message of the user, an answer's
    text and its calls as two messages. They become one message, texts joined by an empty line and
    calls in their order, as people write them who know that model. Results stay apart: a template
    tells them from each other by their ids."""
    found: list[dict[str, object]] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"] and message["role"] in _JOINED:
            found[-1] = _both(found[-1], message)
        else:
            found.append(dict(message))
    return found


def _both(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    found = {**first, **second}
    for name in _TEXTS:
        texts = [message[name] for message in (first, second) if message.get(name)]
        if texts:
            found[name] = _joined(texts)
    calls = [message.get("tool_calls") for message in (first, second)]
    lists = [part for part in calls if isinstance(part, list)]
    if lists:
        found["tool_calls"] = [call for part in lists for call in part]
    return found


def _joined(texts: list[object]) -> object:
    """Two texts; if one of them is a list of parts, such a list."""
    if all(isinstance(text, str) for text in texts):
        return "\n\n".join(map(str, texts))
    parts = ([{"type": "text", "text": t}] if isinstance(t, str) else t for t in texts)
    return [part for some in parts if isinstance(some, list) for part in some]

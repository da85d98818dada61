"""Converts a checkpoint's chat templates to the `tokenizer.chat_template*` keys of GGUF.

They are looked up as in transformers: chat_template.jinja and the folder of further templates take
precedence over tokenizer_config.json, which takes precedence over a processor's
chat_template.json."""

from pathlib import Path

from hotsplit.artifacts.model_file import TEMPLATE_KEY, TEMPLATES_KEY
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import Value
from hotsplit.files.json_file import read_object, read_text

DEFAULT = "default"
OTHERS = "additional_chat_templates"


def template_keys(folder: Path) -> tuple[dict[str, Value], list[str]]:
    """Returns (keys, notes). The default template gets GGUF's standard key, each other template a
    key derived from its name, and one more key lists those names. Raises HotsplitError for a file
    that cannot be read, for templates that are not strings, and for two names with the same key."""
    found = _of_files(folder) or _of_json(folder / "tokenizer_config.json")
    found = found or _of_json(folder / "chat_template.json")
    keys: dict[str, Value] = {}
    if DEFAULT in found:
        keys[TEMPLATE_KEY] = found.pop(DEFAULT)
    origin: dict[str, str] = {}
    for name in found:
        other = origin.setdefault(_key_name(name), name)
        if other != name:
            raise HotsplitError(
                f"{folder}: the chat templates {other[:80]!r} and {name[:80]!r} would both be"
                f" stored as {_key_name(name)[:80]!r}; rename one of them"
            )
    named = {key_name: found[name] for key_name, name in origin.items()}
    if not named:
        return keys, []
    keys |= {f"{TEMPLATE_KEY}.{name}": text for name, text in named.items()}
    keys[TEMPLATES_KEY] = sorted(named)
    return keys, [f"chat templates besides the default one: {', '.join(sorted(named))}"]


def _key_name(name: str) -> str:
    """The name as gguf's writer spells it in a key: all but ASCII letters and digits become "_"."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def _of_files(folder: Path) -> dict[str, str]:
    paths = {DEFAULT: folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((folder / OTHERS).glob("*.jinja"))}
    return {n: read_text(path, "chat template") for n, path in paths.items() if path.exists()}


def _of_json(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    found = read_object(path, path.name).get("chat_template")
    if isinstance(found, list):
        pairs = [
            (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
            for item in found
        ]
    else:
        pairs = [] if found is None else [(DEFAULT, found)]
    named: dict[str, str] = {}
    for name, text in pairs:
        if not isinstance(name, str) or not name or not isinstance(text, str):
            raise HotsplitError(
                f"{path}: chat_template is neither a string nor a list of named templates; download"
                " the file again"
            )
        named[name] = text
    return named

"""The parts of a checkpoint's tokenizer that go into a model file.

The whole tokenizer.json is stored for our runtime and, if llama.cpp has a tokenizer known to be
equal, llama.cpp's keys as well."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import Keys, SpecialVocab

from hotsplit.artifacts.model_file import END_KEY, TEMPLATE_KEY, TEMPLATES_KEY, TOKENIZER_KEY
from hotsplit.convert.vocabulary import check_tokenizer, differences, num_tokens, vocabulary_keys
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import require_file
from hotsplit.files.gguf_file import Value
from hotsplit.files.json_file import parse_object, read_object, read_text
from hotsplit.files.typed import one_line, shown
from hotsplit.model.tensors import Layout
from hotsplit.tokens.tokenizer_kinds import BYTE_LEVEL, GIVE
from hotsplit.tokens.tokenizer_text import MAX_TOKENS, read_tokenizer, refused

ID_KEYS = {
    "bos": Keys.Tokenizer.BOS_ID,
    "eos": Keys.Tokenizer.EOS_ID,
    "unk": Keys.Tokenizer.UNK_ID,
    "pad": Keys.Tokenizer.PAD_ID,
    "eot": Keys.Tokenizer.EOT_ID,
    "eom": Keys.Tokenizer.EOM_ID,
}
END = "eos_token_id"
OLDER_FILES = ("vocab.json", "tokenizer.model")
MOST_RENAMED = 0.01  # share of tokens that a file may call otherwise, such as reserved ones
ADD_KEYS = {"bos": Keys.Tokenizer.ADD_BOS, "eos": Keys.Tokenizer.ADD_EOS}


@dataclass(frozen=True, kw_only=True)
class TokenizerKeys:
    keys: dict[str, Value]
    notes: tuple[str, ...]


def tokenizer_keys(
    folder: Path, vocab_size: int, layout: Layout, given: Path | None = None
) -> TokenizerKeys:
    """The keys of a checkpoint's tokenizer, special tokens and chat templates, with notes. `given`:
    a tokenizer.json in its place. Raises HotsplitError for a broken file, and for the stock layout
    if there is no tokenizer or llama.cpp has none that is known to be equal."""
    path = given or folder / "tokenizer.json"
    if given is not None and layout == "stock":
        raise HotsplitError(
            f"{given}: llama.cpp's keys are made of the files in the checkpoint's folder; put it"
            " there as tokenizer.json"
        )
    keys: dict[str, Value] = {}
    text, notes = _tokenizer_text(path)
    if text is not None:
        tokenizer = parse_object(path, text, "tokenizer.json")
        check_tokenizer(path, tokenizer)
        read_tokenizer(str(path), text)
        keys[TOKENIZER_KEY] = text
        vocabulary = vocabulary_keys(tokenizer, vocab_size)
        if vocabulary is None:
            notes.insert(0, f"{path}: llama.cpp has no tokenizer known to be equal to this one")
        elif layout == "stock":
            notes += [f"{path}: {difference}" for difference in differences(tokenizer)]
        keys |= vocabulary or {}
        surplus = num_tokens(tokenizer) - vocab_size
        if surplus > 0:
            notes.append(f"{path}: tokens {vocab_size} and up ({surplus}) are not in the model")
    if layout == "stock" and Keys.Tokenizer.MODEL not in keys:
        raise HotsplitError(f"{notes[0]}; the stock layout needs one; use the sparse layout")
    with_merges = keys.get(Keys.Tokenizer.MODEL) == BYTE_LEVEL
    ends, left_out = _special_ids(folder, vocab_size)
    special = _special_keys(folder, vocab_size, with_merges, text is not None)
    templates, more = template_keys(folder)
    if ends:
        special[END_KEY] = ends
    return TokenizerKeys(keys=keys | special | templates, notes=(*notes, *more, *left_out))


def given_tokenizer(path: Path, source: Path, keys: Mapping[str, Value]) -> str:
    """The text of a tokenizer.json that the user gives for a GGUF. Raises HotsplitError for one
    that cannot be used, or whose tokens are not those of the file's keys."""
    text = read_text(path, "tokenizer.json")
    check_tokenizer(path, parse_object(path, text, "tokenizer.json"))
    tokenizer = read_tokenizer(str(path), text)
    listed = keys.get(Keys.Tokenizer.LIST)
    if not isinstance(listed, list) or keys.get(Keys.Tokenizer.MODEL) == "bert":
        return text  # nothing to compare with; llama.cpp's WordPiece has other texts
    named = [(number, tokenizer.id_to_token(number), token) for number, token in enumerate(listed)]
    other = [each for each in named if each[1] not in (None, each[2])]
    if len(other) > MOST_RENAMED * len(listed):
        number, own, theirs = other[0]
        raise HotsplitError(
            f"{path}: is another model's tokenizer: its token {number} is {shown(own)}, that of"
            f" {source} is {shown(theirs)}, and so for {len(other):,} of {len(listed):,}"
        )
    return text


def _tokenizer_text(path: Path) -> tuple[str | None, list[str]]:
    """tokenizer.json, or transformers' conversion of older files, or None; and notes."""
    if path.exists() or path.name != "tokenizer.json":
        return read_text(path, "tokenizer.json"), []
    older = [path.parent / name for name in OLDER_FILES if (path.parent / name).exists()]
    if not older:
        return None, [f"{path.parent}: no tokenizer.json, which text needs; {GIVE}"]
    for file in older:
        require_file(file, "tokenizer's file")
    _check_older(path.parent)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return None, [
            f"{path}: missing, and transformers, which makes it from the older files, is not"
            f" installed (pip install 'hotsplit[convert]'); text needs it: {GIVE}"
        ]
    try:
        with refused(f"{path.parent}: the tokenizers library cannot read the older files"):
            made = AutoTokenizer.from_pretrained(path.parent, local_files_only=True)
        return made.backend_tokenizer.to_str(), [f"{path}: made from older files by transformers"]
    except (
        ValueError,
        OSError,
        KeyError,
        TypeError,
        ImportError,
        AttributeError,
        RuntimeError,
    ) as error:
        reason = one_line((str(error).strip().splitlines() or [type(error).__name__])[0])
        return None, [
            f"{path}: missing, and transformers cannot make it from the older files ({reason});"
            f" text needs it: make it elsewhere and {GIVE}"
        ]


def _check_older(folder: Path) -> None:
    path = folder / "vocab.json"
    if not path.exists():
        return
    vocabulary = read_object(path, "vocab.json")
    if not all(type(n) is int and 0 <= n < MAX_TOKENS for n in vocabulary.values()):
        raise HotsplitError(f"{path}: a token without an id below {MAX_TOKENS}; download it again")
    path = folder / "merges.txt"
    lines = read_text(path, "merges.txt").split("\n")
    for number, line in enumerate(lines, start=1):
        parts = line.split(" ")
        is_merge = len(parts) == 2 and {*parts, "".join(parts)} <= vocabulary.keys()
        if line and not line.startswith("#version") and not is_merge:
            raise HotsplitError(
                f"{path}: line {number} is not a merge of two tokens of vocab.json; download both"
                " again"
            )


def _special_ids(folder: Path, vocab_size: int) -> tuple[list[int], list[str]]:
    """All tokens that end a text (llama.cpp's keys have room for only a few of them), and notes on
    special tokens that the model lacks. Raises HotsplitError for a value that is not a token id."""
    ends, notes = set[int](), list[str]()
    places = [("config.json", END), ("generation_config.json", END)]
    places += [("config.json", key) for key in ("bos_token_id", "unk_token_id", "pad_token_id")]
    for name, key in places:
        path = folder / name
        found = read_object(path, name).get(key) if path.exists() else None
        many = found if isinstance(found, list) and key == END else [found]
        ids = set[int]()
        for number in [] if found is None else many:
            if type(number) is not int or number < 0:
                raise HotsplitError(
                    f"{path}: {key} has {shown(number)}, wanted token ids; correct it there"
                )
            ids.add(number)
        above = sorted(i for i in ids if i >= vocab_size)
        if above:
            notes.append(f"{path}: {key} {shown(above[0])} is not a token of the model")
        if key == END:
            ends |= ids.difference(above)
    return sorted(ends), notes


def _special_keys(
    folder: Path, vocab_size: int, with_merges: bool, has_tokenizer: bool
) -> dict[str, Value]:
    """Merges, ids of the special tokens, and flags for tokens added to a text."""
    special = _special_vocab(folder, vocab_size, with_merges)
    keys: dict[str, Value] = {}
    if special.merges:
        keys[Keys.Tokenizer.MERGES] = special.merges
    for name, number in special.special_token_ids.items():
        if name in ID_KEYS:
            keys[ID_KEYS[name]] = np.uint32(number)
    for name, key in ADD_KEYS.items():
        if has_tokenizer or name in special.add_special_token:
            keys[key] = special.add_special_token.get(name, False)
    return keys


def _special_vocab(folder: Path, vocab_size: int, with_merges: bool) -> SpecialVocab:
    if (folder / "tokenizer_config.json").exists():
        path = folder / "tokenizer_config.json"
        values = read_object(path, path.name)
        for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = values.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if not isinstance(text, str) and value is not None:
                raise HotsplitError(
                    f"{path}: {key} is {shown(value)}, wanted the text of a token; correct it there"
                )
        for key in ("add_bos_token", "add_eos_token"):
            if not isinstance(values.get(key), bool | None):
                raise HotsplitError(
                    f"{path}: {key} is {shown(values[key])}, wanted true or false; correct it there"
                )
    names = ("bos", "eos", "unk", "pad")
    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)  # our notes have what matters
    try:
        return SpecialVocab(folder, with_merges, names, vocab_size)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OSError) as error:
        raise HotsplitError(
            f"{folder}: the special tokens cannot be read ({one_line(error)}); download"
            " tokenizer.json and tokenizer_config.json again"
        ) from error


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

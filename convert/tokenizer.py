"""Everything of a checkpoint's tokenizer that goes into a model file.

It goes in twice: tokenizer.json whole, which our runtime reads, and llama.cpp's keys."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import Keys, SpecialVocab

from sparkinfer.architecture import Layout
from sparkinfer.convert.json_file import read_object, read_text
from sparkinfer.convert.llama_differences import differences
from sparkinfer.convert.vocabulary import check_tokenizer, num_tokens, vocabulary_keys
from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import Value
from sparkinfer.model_file import TEMPLATE_KEY, TOKENIZER_KEY

ID_KEYS = {
    "bos": Keys.Tokenizer.BOS_ID,
    "eos": Keys.Tokenizer.EOS_ID,
    "unk": Keys.Tokenizer.UNK_ID,
    "pad": Keys.Tokenizer.PAD_ID,
    "eot": Keys.Tokenizer.EOT_ID,
}
ADD_KEYS = {"bos": Keys.Tokenizer.ADD_BOS, "eos": Keys.Tokenizer.ADD_EOS}


@dataclass(frozen=True, kw_only=True)
class TokenizerKeys:
    keys: dict[str, Value]
    notes: tuple[str, ...]


def tokenizer_keys(folder: Path, vocab_size: int, layout: Layout) -> TokenizerKeys:
    """Raises SparkinferError for a broken file, and for the stock layout where llama.cpp would
    have no tokenizer or another one."""
    path = folder / "tokenizer.json"
    keys: dict[str, Value] = {}
    notes: list[str] = []
    has_tokenizer = path.exists()
    if has_tokenizer:
        tokenizer = read_object(path, "tokenizer.json")
        check_tokenizer(path, tokenizer)
        keys[TOKENIZER_KEY] = read_text(path, "tokenizer.json")
        vocabulary = vocabulary_keys(tokenizer, vocab_size)
        if vocabulary is None:
            notes.append(f"{path}: llama.cpp has no tokenizer known to be equal to this one")
        elif layout == "stock":
            notes += [f"{path}: {difference}" for difference in differences(tokenizer)]
        keys |= vocabulary or {}
        surplus = num_tokens(tokenizer) - vocab_size
        if surplus > 0:
            notes.append(f"{path}: token {vocab_size} and up ({surplus}) are not in the model")
    else:
        notes.append(f"{folder}: no tokenizer.json; generate needs a tokenizer")
    if layout == "stock" and Keys.Tokenizer.MODEL not in keys:
        raise SparkinferError(f"{notes[0]}; the stock layout needs one; use the sparse layout")
    with_merges = keys.get(Keys.Tokenizer.MODEL) == "gpt2"
    special, more = _special_keys(folder, vocab_size, with_merges, has_tokenizer)
    return TokenizerKeys(keys=keys | special, notes=(*notes, *more))


def _special_keys(
    folder: Path, vocab_size: int, with_merges: bool, has_tokenizer: bool
) -> tuple[dict[str, Value], list[str]]:
    """Merges, numbers of the special tokens, what is added to a text, and the chat template."""
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
    template, notes = _template(special.chat_template)
    if template is not None:
        keys[TEMPLATE_KEY] = template
    return keys, notes


def _special_vocab(folder: Path, vocab_size: int, with_merges: bool) -> SpecialVocab:
    """gguf's reading of tokenizer.json, tokenizer_config.json, config.json and the template."""
    if (folder / "tokenizer_config.json").exists():
        read_object(folder / "tokenizer_config.json", "tokenizer_config.json")
    names = ("bos", "eos", "unk", "pad")
    try:
        return SpecialVocab(folder, with_merges, names, vocab_size)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OSError) as error:
        raise SparkinferError(
            f"{folder}: the special tokens cannot be read ({error}); get tokenizer.json and"
            " tokenizer_config.json again"
        ) from error


def _template(found: object) -> tuple[str | None, list[str]]:
    """The chat template; of several, the one named default."""
    if not isinstance(found, list):
        return (found if isinstance(found, str) else None), []
    named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
    template = named.pop("default", None)
    notes = [f"chat templates left out: {', '.join(map(str, named))}"] if named else []
    return (template if isinstance(template, str) else None), notes

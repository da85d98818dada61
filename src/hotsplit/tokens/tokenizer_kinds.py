"""The kinds of tokenizers that GGUF files name: SentencePiece's, which are rebuilt from the file's
keys, and those that are not, and why. byte_level.py has those of bytes.

The `tokenizers` library has most of the latter, so the model's tokenizer.json can be given
instead."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SentencePieceKind:
    """BPE of characters. `has_merges`: the file lists them, else they follow from scores, and a
    space is put before a text unless the file says otherwise. `always_begins`: texts begin with the
    file's token even where it says that they do not."""

    has_merges: bool = False
    always_begins: bool = False


# By tokenizer.ggml.model.
BYTE_LEVEL, BY_SCORES = "gpt2", "llama"
SENTENCEPIECE_KINDS = {
    BY_SCORES: SentencePieceKind(),
    # llama.cpp begins its texts, too: the first files say false.
    "gemma4": SentencePieceKind(has_merges=True, always_begins=True),
}
# Parts of a model's name -> its control tokens that do not take the white space behind them, as its
# others do, of which a file says nothing (llama.cpp's llama-vocab.cpp goes by the name, too).
_NOT_STRIPPING = {("phi-3", "phi3"): ("<unk>", "<s>", "<|endoftext|>")}
GIVE = "give the model's tokenizer.json with --tokenizer FILE, to run or to convert"
# Those that are not rebuilt.
_MODELS = {
    "bert": "WordPiece, of encoders, which generate no text",
    "t5": "SentencePiece's unigram model, of encoders and encoder-decoders",
    "rwkv": "RWKV's own tokenizer",
    "plamo2": "PLaMo 2's own tokenizer",
    "whitespace": "whole words, of encoders",
    "hybriddna": "letters of DNA",
    "none": "the file has no tokenizer",
    "no_vocab": "the file has no tokenizer",
}
# By tokenizer.ggml.pre.
_CHARACTERS = "which is for merges of characters, not of bytes"
_PRE_TOKENIZERS = {
    "gemma4": _CHARACTERS,
    "granite-embed-multi-311m": _CHARACTERS,
    "sarvam-moe": _CHARACTERS,
    "whitespace": "which is for encoders",
    None: "as in files made before May 2024, so how its text is split is not known",
}


def strips(model_name: str, token: str) -> bool:
    """True for a control token that takes the white space behind it."""
    name = model_name.lower()
    found = (tokens for parts, tokens in _NOT_STRIPPING.items() if any(p in name for p in parts))
    return any(token not in tokens for tokens in found)


def why_model(name: object) -> str:
    """Why a tokenizer of this kind is not rebuilt, in brackets; empty for an unknown one."""
    why = _MODELS.get(name) if isinstance(name, str) else None
    return "" if why is None else f" ({why})"


def why_pre_tokenizer(name: object) -> str:
    """Why text is not split as this pre-tokenizer would."""
    known = _PRE_TOKENIZERS.get(name) if name is None or isinstance(name, str) else None
    return known or "which is unknown (docs/tokenizers.md lists the known ones)"


# Texts of tokens that end a text or a turn, whatever a file says that they are: llama.cpp's
# special_eog_ids (llama-vocab.cpp, 2026).
_END_TEXTS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>
    <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>
    <eos> <turn|> <|tool_response> [e~[ <\uff5cend\u2581of\u2581sentence\uff5c>
"""
END_TEXTS = tuple(_END_TEXTS.split())
# Tokens around the files of a repository, behind which a completion of code ends; a file may name
# one of each kind, and otherwise they are known by their texts.
CODE_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Tokens before a prefix, before a suffix and before what goes between them (llama-vocab.cpp).
_INFILL_TEXTS = {
    "fim_pre": """<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE>
        \u2581<PRE> <|code_prefix|> <|prefix|>""",
    "fim_suf": """<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF>
        \u2581<SUF> <|code_suffix|> <|suffix|>""",
    "fim_mid": """<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID>
        \u2581<MID> <|code_middle|> <|middle|>""",
}
INFILL_TEXTS = {kind: tuple(texts.split()) for kind, texts in _INFILL_TEXTS.items()}
CONTROL_TEXTS = frozenset(END_TEXTS).union(*CODE_TEXTS.values())

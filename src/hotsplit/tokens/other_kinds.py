"""Tokenizers of GGUF files that are not rebuilt from the file's keys, and why.

The `tokenizers` library has most of them, so the model's tokenizer.json can be given instead."""

GIVE = "give the model's tokenizer.json with --tokenizer FILE, to run or to convert"
# By tokenizer.ggml.model.
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


def why_model(name: object) -> str:
    """Why a tokenizer of this kind is not rebuilt, in brackets; empty for an unknown one."""
    why = _MODELS.get(name) if isinstance(name, str) else None
    return "" if why is None else f" ({why})"


def why_pre_tokenizer(name: object) -> str:
    """Why text is not split as this pre-tokenizer would."""
    known = _PRE_TOKENIZERS.get(name) if name is None or isinstance(name, str) else None
    return known or "which is unknown (docs/tokenizers.md lists the known ones)"

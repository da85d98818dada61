"""Summarises a GGUF: one of our model files, a plan, or a third-party file.

A file that the runtime refuses is also described, with the reason (from model_file)."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from hotsplit.artifacts.model_file import TEMPLATE_KEY, TOKENIZER_KEY, ModelFile, PredictorInfo
from hotsplit.artifacts.model_gguf import SPLIT_ARCHITECTURE
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, Value, open_gguf
from hotsplit.inspection.artifact_summaries import SplitSummary
from hotsplit.model.spec import Activation, ModelSpec
from hotsplit.model.tensors import Layout

SHOWN_LENGTH = 80  # characters of a text
# The beginning of a tensor's name, without "blk.N.", -> its part; the first match wins.
PARTS = (
    ("ffn_pred_", "predictors"),
    ("fc1.", "predictors"),  # PowerInfer's
    ("fc2.", "predictors"),
    ("attn_", "attention"),
    ("ffn_norm", "attention"),
    ("post_", "attention"),
    ("ffn_", "ffn"),
    ("token_embd", "embedding"),
    ("position_embd", "embedding"),
    ("output", "head"),
)


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A number of tensors and their bytes."""

    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class TensorFact:
    name: str
    kind: str
    shape: tuple[int, ...]  # outermost dimension first
    part: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """`is_whole` is true if tokenizer.json is in the file; otherwise `tokenizer.ggml.*` is used."""

    is_whole: bool
    model: str | None  # tokenizer.ggml.model
    num_tokens: int
    special_ids: dict[str, int]
    has_chat_template: bool


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The runtime's view of a file that it can run."""

    layout: Layout
    model_id: str
    spec: ModelSpec
    activation: Activation
    threshold_L: tuple[float, ...]
    limits: str | None  # sha256, as profiles and predictors name it; None: no limits
    predictor: PredictorInfo | None
    is_tied: bool


@dataclass(frozen=True, kw_only=True)
class GgufSummary:
    """`keys` are those not covered by `model` (all without it); long texts and arrays are cut, with
    their length added."""

    kind: str  # "model file", or "GGUF" if the runtime refuses it
    path: Path
    file_bytes: int
    architecture: str
    refusal: str | None  # why the runtime would not run it
    model: ModelFacts | None
    tokenizer: TokenizerFacts
    by_type: dict[str, Amount]
    by_part: dict[str, Amount]
    keys: dict[str, str | int | float | bool]
    tensors: tuple[TensorFact, ...]


def summarise_gguf(path: Path) -> GgufSummary | SplitSummary:
    """The facts in a GGUF. Raises HotsplitError for an incomplete GGUF and for an invalid
    plan."""
    file = open_gguf(path, "GGUF file")
    if file.keys.get("general.architecture") == SPLIT_ARCHITECTURE:
        return SplitSummary.load(path)
    try:
        model = ModelFile.load(path)
    except HotsplitError as error:
        return _summary(path, file.keys, file.tensors, None, str(error).removeprefix(f"{path}: "))
    return _summary(path, model.extra_keys, model.tensors, model, None)


def _summary(
    path: Path,
    keys: Mapping[str, Value],
    tensors: Mapping[str, TensorEntry],
    model: ModelFile | None,
    refusal: str | None,
) -> GgufSummary:
    facts = tuple(_tensor_fact(name, entry) for name, entry in tensors.items())
    shown = {k: v for k, v in keys.items() if not k.startswith("GGUF.")}
    found = str(keys.get("general.architecture", "none"))
    return GgufSummary(
        kind="model file" if model else "GGUF",
        path=path,
        file_bytes=path.stat().st_size,
        architecture=model.architecture if model else found,
        refusal=refusal,
        model=None if model is None else _model_facts(model),
        tokenizer=_tokenizer_facts(keys),
        by_type=_amounts(facts, lambda fact: fact.kind),
        by_part=_amounts(facts, lambda fact: fact.part),
        keys={name: _short(value) for name, value in shown.items()},
        tensors=facts,
    )


def _model_facts(model: ModelFile) -> ModelFacts:
    return ModelFacts(
        layout=model.layout,
        model_id=model.model_id,
        spec=model.bare_spec,
        activation=model.activation,
        threshold_L=model.threshold_L,
        limits=model.limits.sha256,
        predictor=model.predictor,
        is_tied=model.is_tied,
    )


def part_of(name: str) -> str:
    """A tensor's part: attention (with norms, as in a plan), ffn, predictors, embedding, ..."""
    if name.startswith("blk."):
        name = name.split(".", 2)[-1]
    return next((part for start, part in PARTS if name.startswith(start)), "other")


def _tensor_fact(name: str, entry: TensorEntry) -> TensorFact:
    return TensorFact(
        name=name, kind=entry.kind, shape=entry.shape, part=part_of(name), num_bytes=entry.num_bytes
    )


def _amounts(facts: Iterable[TensorFact], key_of: Callable[[TensorFact], str]) -> dict[str, Amount]:
    """Amounts by key, the largest first."""
    groups: dict[str, list[int]] = {}
    for fact in facts:
        groups.setdefault(key_of(fact), []).append(fact.num_bytes)
    order = sorted(groups, key=lambda key: -sum(groups[key]))
    return {k: Amount(num_tensors=len(groups[k]), num_bytes=sum(groups[k])) for k in order}


def _tokenizer_facts(keys: Mapping[str, Value]) -> TokenizerFacts:
    start, end = "tokenizer.ggml.", "_token_id"
    tokens, name = keys.get(start + "tokens"), keys.get(start + "model")
    ids = {k.removeprefix(start).removesuffix(end): v for k, v in keys.items()
           if k.startswith(start) and k.endswith(end)}  # fmt: skip
    return TokenizerFacts(
        is_whole=TOKENIZER_KEY in keys,
        model=name if isinstance(name, str) else None,
        num_tokens=len(tokens) if isinstance(tokens, list) else 0,
        special_ids={k: int(v) for k, v in ids.items() if isinstance(v, np.integer)},
        has_chat_template=TEMPLATE_KEY in keys,
    )


def _short(value: Value) -> str | int | float | bool:
    """A value for display: a number as Python's, a long text or an array cut, with its length."""
    if isinstance(value, np.number):
        return cast(int | float, value.item())
    if isinstance(value, list):
        some = ", ".join(str(item)[:20] for item in value[:4])
        return f"[{some}{', ...' if len(value) > 4 else ''}] ({len(value):,} values)"
    if isinstance(value, str) and len(value) > SHOWN_LENGTH:
        return f"{value[:SHOWN_LENGTH]}... ({len(value):,} characters)"
    return value

"""Summarises a GGUF: one of our model files, a plan, or a third-party file.

A file that the runtime refuses is also described, with the reason (from model_file)."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.table import Table

from hotsplit.artifacts import importance_file
from hotsplit.artifacts.model_file import TEMPLATE_KEY, TOKENIZER_KEY, ModelFile
from hotsplit.artifacts.model_gguf import SPLIT_ARCHITECTURE
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.context_bytes import draft_words, text_words
from hotsplit.costs.default_mode import dense_bytes
from hotsplit.costs.type_bytes import TypeBytes, type_bytes, type_words
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, Value, open_gguf
from hotsplit.files.gguf_parts import num_bytes_of
from hotsplit.inspection import file_summary
from hotsplit.inspection.artifact_summaries import ImportancesSummary, SplitSummary
from hotsplit.model.spec_facts import spec_facts
from hotsplit.model.tensors import draft_shapes
from hotsplit.system.sizes import format_bytes
from hotsplit.tokens.ggml_tokenizer import check_text_keys

SHOWN_LENGTH = 80  # characters of a text
# The beginning of a tensor's name, without "blk.N.", -> its part; the first match wins.
PARTS = (
    ("ffn_pred_", "predictors"),
    ("fc1.", "predictors"),  # PowerInfer's
    ("fc2.", "predictors"),
    ("attn_", "attention"),
    ("ffn_norm", "attention"),
    ("post_", "attention"),
    # Of gated delta nets; other recurrent layers, which nothing here runs, have more.
    *((f"ssm_{name}", "attention") for name in ("a", "b", "conv1d", "dt", "norm", "out")),
    ("ffn_", "ffn"),
    ("token_embd", "embedding"),
    ("position_embd", "embedding"),
    ("output", "head"),
)


@dataclass(frozen=True, kw_only=True)
class TensorAmount:
    """A number of tensors and their bytes."""

    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class TensorFact:
    name: str
    kind: str
    shape: tuple[int, ...]  # outermost dimension first
    part: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """`is_whole` is true if tokenizer.json is in the file; otherwise `tokenizer.ggml.*` is used.
    `refusal` says why text cannot be tokenised with either."""

    is_whole: bool
    model: str | None  # tokenizer.ggml.model
    num_tokens: int
    special_ids: dict[str, int]
    has_chat_template: bool
    refusal: str | None


@dataclass(frozen=True)
class GgufSummary(file_summary.Summary):
    """`model` is the runtime's view of the file; None if it would not run it, for the reason
    `refusal`. `keys` are those not covered by `model` (all without it)."""

    keys: Mapping[str, Value]
    entries: Mapping[str, TensorEntry]
    model: ModelFile | None
    refusal: str | None

    @property
    def kind(self) -> str:
        return "model file" if self.model else "GGUF"

    @property
    def architecture(self) -> str:
        name = str(self.keys.get("general.architecture", "none"))
        return self.model.architecture if self.model else name

    @property
    def tensors(self) -> list[TensorFact]:
        own = self._own_parts
        return [
            TensorFact(name, e.kind, e.shape, own.get(name) or part_of(name), e.num_bytes)
            for name, e in self.entries.items()
        ]

    @cached_property
    def _own_parts(self) -> dict[str, str]:
        """The part of each tensor of operations with rooms of their own; none for a file that
        does not run."""
        if self.model is None:
            return {}
        spec, found = self.model.bare_spec, dict[str, str]()
        for block in (*spec.first, *spec.last):
            found |= dict.fromkeys(block.shapes(spec.hidden_size), "embedding")
        required, optional = draft_shapes(spec, self.model.layout)
        found |= dict.fromkeys((*required, *optional), "draft block")
        for index, layer in enumerate(spec.layers):
            for own in layer.operations:
                names = (f"blk.{index}.{name}" for name in own.shapes(spec.hidden_size))
                found |= dict.fromkeys(names, "attention")
        return found

    @property
    def shown_keys(self) -> dict[str, str | int | float | bool]:
        return {name: _short(v) for name, v in self.keys.items() if not name.startswith("GGUF.")}

    @property
    def content(self) -> dict[str, Any]:
        """Long texts and arrays of `keys` are cut, with their length added."""
        tensors, model = self.tensors, self.model
        facts = model and {
            "layout": model.layout,
            "model_id": model.model_id,
            "spec": model.bare_spec,
            "activation": model.activation,
            "threshold_L": model.threshold_L,
            "predictor": model.predictor,
            "is_tied": model.is_tied,
        }
        return {
            "architecture": self.architecture,
            "refusal": self.refusal,
            "model": facts,
            "tokenizer": self.tokenizer,
            "by_type": _amounts(tensors, lambda fact: fact.kind),
            "types": self.types,
            "by_part": _amounts(tensors, lambda fact: fact.part),
            "keys": self.shown_keys,
            "tensors": tensors,
        }

    @cached_property
    def types(self) -> tuple[TypeBytes, ...]:
        """What becomes of the types of matrices in memory; () for a file that does not run."""
        return type_bytes(self.model.tensors) if self.model else ()

    @property
    def _is_packed(self) -> bool:
        return any(each.is_packed for each in self.types)

    @cached_property
    def tokenizer(self) -> TokenizerFacts:
        start, end = "tokenizer.ggml.", "_token_id"
        tokens, name = self.keys.get(start + "tokens"), self.keys.get(start + "model")
        ids = {
            k.removeprefix(start).removesuffix(end): v
            for k, v in self.keys.items()
            if k.startswith(start) and k.endswith(end)
        }
        refusal = None
        try:
            check_text_keys(self.path, self.keys)
        except HotsplitError as error:
            refusal = str(error).removeprefix(f"{self.path}: ")
        return TokenizerFacts(
            is_whole=TOKENIZER_KEY in self.keys,
            model=name if isinstance(name, str) else None,
            num_tokens=len(tokens) if isinstance(tokens, list) else 0,
            special_ids={k: int(v) for k, v in ids.items() if isinstance(v, np.integer)},
            has_chat_template=TEMPLATE_KEY in self.keys,
            refusal=refusal,
        )

    @property
    def facts(self) -> list[file_summary.Row]:
        rows: list[file_summary.Row] = [("architecture", self.architecture)]
        if self.refusal is not None:
            rows.append(("refused by the runtime", self.refusal))
        if self.model is not None:
            m = self.model
            head = "the embedding (tied)" if m.is_tied else "its own matrix (not tied)"
            whole = sum(entry.num_bytes for entry in m.tensors.values())
            read = f"{format_bytes(dense_bytes(m))} of {format_bytes(whole)}"  # in mode dense
            rows += [
                ("layout", m.layout),
                ("activation", m.activation),
                ("thresholds", file_summary.span(m.threshold_L)),
                *([("in memory", type_words(self.types))] if self._is_packed else []),
                *spec_facts(m.bare_spec),
                *([("note", note)] if (note := m.skipped_note or m.draft_note) else []),
                *([("draft block takes", words)] if (words := draft_words(m)) else []),
                *([("a text keeps", kept)] if (kept := text_words(m)) else []),
                *([("a token reads", read)] if m.bare_spec.has_experts else []),
                ("output head", head),
                *([] if m.predictor else [("predictors", "none")]),
                ("model id", m.model_id),
            ]
        return [*rows, *self._tokenizer_rows()]

    def _tokenizer_rows(self) -> list[file_summary.Row]:
        t = self.tokenizer
        if not t.is_whole and t.model is None:
            return [("tokenizer", "none")]
        ids = ", ".join(f"{name} {number}" for name, number in t.special_ids.items())
        whole = "yes" if t.is_whole else "no: text is tokenised by llama.cpp's keys"
        return [
            *([("refused as tokenizer", t.refusal)] if t.refusal else []),
            ("tokenizer.json", whole),
            ("tokenizer.ggml", f"{t.model or 'none'}, {t.num_tokens:,} tokens; {ids or 'no ids'}"),
            ("chat template", "yes" if t.has_chat_template else "no"),
        ]

    def tables(self, *, all_tensors: bool) -> list[Table]:
        size = format_bytes(num_bytes_of(self.path))
        head = [("file", self.path), ("size", size), *self.facts]
        every = self.tensors
        chosen = [f for f in every if all_tensors or not re.match(r"blk\.(?!0\.)", f.name)]
        columns = {
            "name": [f.name for f in chosen],
            "type": [f.kind for f in chosen],
            "shape": [" x ".join(map(str, f.shape)) for f in chosen],
            "part": [f.part for f in chosen],
            "bytes": [f"{f.num_bytes:,}" for f in chosen],
        }
        tensors = file_summary.columns_table("tensors", columns)
        if len(chosen) < len(every):
            tensors.caption = f"and {len(every) - len(chosen):,} of the other layers: --tensors"
        tables = [
            file_summary.facts_table(self.kind, head),
            _amounts_table("by type", _amounts(every, lambda fact: fact.kind)),
            _amounts_table("by part", _amounts(every, lambda fact: fact.part)),
        ]
        if self.model and self.model.predictor:
            tables += file_summary.value_tables("predictors", vars(self.model.predictor))
        if keys := self.shown_keys:
            tables.append(
                file_summary.facts_table("other keys" if self.model else "keys", keys.items())
            )
        return [*tables, tensors]


def summarise_gguf(path: Path) -> GgufSummary | SplitSummary | ImportancesSummary:
    """The facts in a GGUF. Raises HotsplitError for an incomplete one or an invalid plan."""
    file = open_gguf(path, "GGUF file")
    if file.keys.get("general.architecture") == SPLIT_ARCHITECTURE:
        return SplitSummary(path, Split.load(path))
    if file.keys.get("general.type") == importance_file.TYPE:
        return ImportancesSummary(path, importance_file.Importances.load(path))
    try:
        model = ModelFile.load(path)
    except HotsplitError as error:
        why = str(error).removeprefix(f"{path}: ")
        return GgufSummary(path, file.keys, file.tensors, None, why)
    stored = {name: file.tensors.get(name, entry) for name, entry in model.tensors.items()}
    return GgufSummary(path, model.extra_keys, stored, model, None)


def part_of(name: str) -> str:
    """A tensor's part: attention (with norms and delta nets, as in a plan), ffn, predictors,
    embedding, ..."""
    if name.startswith("blk."):
        name = name.split(".", 2)[-1]
    return next((part for start, part in PARTS if name.startswith(start)), "other")


def _amounts(
    facts: Iterable[TensorFact], key_of: Callable[[TensorFact], str]
) -> dict[str, TensorAmount]:
    """Amounts by key, the largest first."""
    groups: dict[str, list[int]] = {}
    for fact in facts:
        groups.setdefault(key_of(fact), []).append(fact.num_bytes)
    order = sorted(groups, key=lambda key: -sum(groups[key]))
    return {k: TensorAmount(num_tensors=len(groups[k]), num_bytes=sum(groups[k])) for k in order}


def _amounts_table(title: str, amounts: dict[str, TensorAmount]) -> Table:
    sizes = [amount.num_bytes for amount in amounts.values()]
    columns = {
        "": amounts,
        "tensors": [amount.num_tensors for amount in amounts.values()],
        "bytes": [f"{size:,}" for size in sizes],
        "\0size": map(format_bytes, sizes),
        "share": [f"{size / (sum(sizes) or 1):.1%}" for size in sizes],
    }
    return file_summary.columns_table(title, columns)


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

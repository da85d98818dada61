"""Measures how predictors change the model."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Corpus
from hotsplit.measure.evaluate.quality import EvalReport, ShareCounter, compare_all, mean_bytes
from hotsplit.model.mode_quality import ModeQuality, SparseMode
from hotsplit.runtime.engine import Engine

# The model is compared with its dense self on at most this many tokens, and one more if the last
# window would otherwise have a single one.
MAX_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class ModeComparison:
    """A comparison of mode predicted with the dense model, and the record of every mode."""

    report: EvalReport
    record: Mapping[SparseMode, ModeQuality]


def measure(
    dense: Engine, predictors: Predictors, windows: Sequence[Tensor], corpus_sha256: str
) -> ModeComparison:
    """Compares mode predicted with the dense model."""
    chosen, left = [], MAX_TOKENS
    for ids in windows:
        chosen.append(ids[: max(2, left)])
        left -= len(ids)
        if left <= 0:
            break
    dense_shares = ShareCounter(dense.model)
    with Engine.of(
        with_predictors(dense.model, predictors),
        mode="predicted",
        device=str(dense.device),
        context_length=dense.context_length,
        is_resident=False,
    ) as engine:
        (report,) = compare_all(dense, [engine], chosen, dense_shares=dense_shares)
    return recorded(dense.model, report, dense_shares, corpus_sha256)


def recorded(
    model: ModelFile, report: EvalReport, dense_shares: ShareCounter, corpus_sha256: str
) -> ModeComparison:
    """The report on mode predicted, and the record of both sparse modes."""
    exact = ModeQuality(
        perplexity_increase=0.0,
        perplexity_half_width=0.0,
        kl_mean=0.0,
        top1_agreement=1.0,
        num_tokens=report.num_tokens,
        bytes_per_token=mean_bytes(model, "exact", dense_shares),
        dense_bytes_per_token=report.dense_bytes_per_token,
        corpus_sha256=corpus_sha256,
    )
    record: dict[SparseMode, ModeQuality] = {"exact": exact}
    if (predicted := report.record(corpus_sha256)) is not None:
        record["predicted"] = predicted
    return ModeComparison(report=report, record=record)


def sha256_of_corpora(corpora: Sequence[Corpus]) -> str:
    """The corpus's hex digest; for several, the sha256 of their concatenated hex digests."""
    if len(corpora) == 1:
        return corpora[0].sha256
    return hashlib.sha256("".join(c.sha256 for c in corpora).encode()).hexdigest()


def with_predictors(model: ModelFile, predictors: Predictors) -> ModelFile:
    """The model with these predictors, as `convert` would make it."""
    entries = {n: e for n, e in model.tensors.items() if ".ffn_pred_" not in n}
    for layer, predictor in enumerate(predictors.layers):
        entries |= predictor.entries(layer)
    return replace(model, tensors=entries, predictor=predictors.info, quality={})

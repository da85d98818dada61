"""Prints summaries, and other names with values, as tables on stdout."""

from collections.abc import Sequence

from rich.table import Table

from hotsplit.artifacts.machine_file import Figure
from hotsplit.artifacts.model_file import PredictorInfo
from hotsplit.inspection.artifact_summaries import (
    MachineSummary,
    PredictorsSummary,
    ProfileSummary,
    SplitSummary,
)
from hotsplit.inspection.gguf_summary import Amount, GgufSummary, TensorFact, TokenizerFacts
from hotsplit.inspection.inspect_file import Summary
from hotsplit.inspection.printing import Row, columns_table, facts_table, print_tables
from hotsplit.model.spec_facts import spec_facts
from hotsplit.system.sizes import format_bytes


def print_summary(summary: Summary, *, all_tensors: bool) -> None:
    """Prints a summary on stdout. Of a GGUF, it lists all tensors if `all_tensors`, otherwise those
    outside the layers and those of the first layer."""
    print_tables(_tables(summary, all_tensors))


def _tables(summary: Summary, all_tensors: bool) -> list[Table]:
    head = facts_table(
        summary.kind,
        [("file", summary.path), ("size", format_bytes(summary.file_bytes)), *_facts_of(summary)],
    )
    match summary:
        case GgufSummary():
            return [head, *_gguf_tables(summary, all_tensors)]
        case ProfileSummary():
            return [head, _profile_layers(summary)]
        case PredictorsSummary():
            return [head, _predictor_layers(summary.predictor)]
        case SplitSummary():
            return [head, _split_gpus(summary), _split_bytes(summary), _split_layers(summary)]
        case MachineSummary():
            return [head, *_gpus(summary)]


def _facts_of(summary: Summary) -> list[Row]:
    match summary:
        case GgufSummary():
            return _gguf_facts(summary)
        case ProfileSummary():
            return _profile_facts(summary)
        case PredictorsSummary():
            return _predictors_facts(summary)
        case SplitSummary():
            return _split_facts(summary)
        case MachineSummary():
            return _machine_facts(summary)


# ---- GGUF ----------------------------------------------------------------------------------


def _gguf_facts(summary: GgufSummary) -> list[Row]:
    rows: list[Row] = [("architecture", summary.architecture)]
    if summary.refusal is not None:
        rows.append(("refused by the runtime", summary.refusal))
    if summary.model is not None:
        m = summary.model
        rows += [
            ("layout", m.layout),
            ("activation", m.activation),
            ("thresholds", _span(m.threshold_L)),
            *([("limits", f"sha256 {m.limits[:12]}")] if m.limits else []),
            *spec_facts(m.spec),
            ("output head", "the embedding (tied)" if m.is_tied else "its own matrix (not tied)"),
            *_predictor_facts(m.predictor),
            ("model id", m.model_id),
        ]
    return [*rows, *_tokenizer_facts(summary.tokenizer)]


def _tokenizer_facts(t: TokenizerFacts) -> list[Row]:
    if not t.is_whole and t.model is None:
        return [("tokenizer", "none")]
    ids = ", ".join(f"{name} {number}" for name, number in t.special_ids.items())
    return [
        ("tokenizer.json", "yes" if t.is_whole else "no: text is tokenised by llama.cpp's keys"),
        ("tokenizer.ggml", f"{t.model or 'none'}, {t.num_tokens:,} tokens; {ids or 'no ids'}"),
        ("chat template", "yes" if t.has_chat_template else "no"),
    ]


def _gguf_tables(summary: GgufSummary, all_tensors: bool) -> list[Table]:
    chosen = [f for f in summary.tensors if all_tensors or _stands_for_others(f)]
    tensors = columns_table("tensors", ["name", "type", "shape", "part", "bytes"], [
        (f.name, f.kind, " x ".join(map(str, f.shape)), f.part, f"{f.num_bytes:,}") for f in chosen
    ])  # fmt: skip
    if len(chosen) < len(summary.tensors):
        left = len(summary.tensors) - len(chosen)
        tensors.caption = f"and {left:,} of the other layers: --tensors"
    tables = [_amounts("by type", summary.by_type), _amounts("by part", summary.by_part)]
    if summary.model and summary.model.predictor and _differ(summary.model.predictor):
        tables.append(_predictor_layers(summary.model.predictor))
    if summary.keys:
        tables.append(facts_table("other keys" if summary.model else "keys", summary.keys.items()))
    return [*tables, tensors]


def _stands_for_others(fact: TensorFact) -> bool:
    return not fact.name.startswith("blk.") or fact.name.split(".")[1] == "0"


def _amounts(title: str, amounts: dict[str, Amount]) -> Table:
    total = sum(amount.num_bytes for amount in amounts.values()) or 1
    return columns_table(title, ["", "tensors", "bytes", "", "share"], [
        (name, a.num_tensors, f"{a.num_bytes:,}", format_bytes(a.num_bytes),
         f"{a.num_bytes / total:.1%}")
        for name, a in amounts.items()
    ])  # fmt: skip


# ---- profile, predictors -------------------------------------------------------------------


def _profile_facts(summary: ProfileSummary) -> list[Row]:
    corpora = [
        ("corpus", f"{c.name}: {c.num_tokens:,} tokens, sha256 {c.sha256[:12]}")
        for c in summary.corpora
    ]
    return [
        ("model id", summary.model_id),
        ("tokens", f"{summary.num_tokens:,}"),
        ("counted with", summary.arithmetic or "unknown"),
        *([("limits", f"of a model file, sha256 {summary.limits[:12]}")] if summary.limits else []),
        *corpora,
        ("layers", summary.num_layers),
        ("neurons a layer", f"{summary.num_neurons:,}"),
        ("density", f"{summary.density:.2%}"),
    ]


def _profile_layers(summary: ProfileSummary) -> Table:
    columns = ["layer", "density", "firings of the hottest fifth", "never fired", "threshold"]
    return columns_table("layers", columns, [
        (layer, f"{density:.2%}", f"{fifth:.1%}", f"{never:,}", f"{threshold:g}")
        for layer, (density, fifth, never, threshold) in enumerate(zip(
            summary.density_L, summary.hottest_fifth_L, summary.never_fired_L,
            summary.threshold_L, strict=True))
    ])  # fmt: skip


def _predictors_facts(summary: PredictorsSummary) -> list[Row]:
    return [
        ("model id", summary.model_id or "unknown: not made by this program"),
        ("layers", summary.num_layers),
        ("width", f"{summary.width:,}"),
        ("neurons a layer", f"{summary.num_neurons:,}"),
        *_predictor_facts(summary.predictor),
        ("biases", "yes" if summary.has_biases else "no"),
        (
            "weights",
            f"{format_bytes(summary.weight_bytes)}, {', '.join(sorted({*summary.type_L}))}",
        ),
    ]


def _predictor_facts(predictor: PredictorInfo | None) -> list[Row]:
    if predictor is None:
        return [("predictors", "none")]
    offset = predictor.input_layer_offset
    return [
        ("predictors", predictor.kind),
        ("predictor ranks", _span(predictor.rank_L)),
        ("predictor input", f"the FFN input of {'the layer before' if offset else 'its layer'}"),
        ("predictor thresholds", _span(predictor.threshold_L)),
        ("predicted density", _span(predictor.density_L, ".1%")),
    ]


def _predictor_layers(predictor: PredictorInfo) -> Table:
    density_L = [f"{density:.2%}" for density in predictor.density_L]
    return columns_table("predictors by layer", ["layer", "rank", "threshold", "predicted density"], [
        (layer, rank, f"{threshold:g}", density)
        for layer, (rank, threshold, density) in enumerate(zip(
            predictor.rank_L, predictor.threshold_L,
            density_L or ["unknown"] * len(predictor.rank_L), strict=True))
    ])  # fmt: skip


def _differ(predictor: PredictorInfo) -> bool:
    per_layer = (predictor.rank_L, predictor.threshold_L, predictor.density_L)
    return any(len(set(values)) > 1 for values in per_layer)


# ---- split, machine ------------------------------------------------------------------------


def _cache_facts(summary: SplitSummary) -> list[Row]:
    if summary.cache is None:
        return []
    gpu, cpu = (side["neuron_cache"] for side in (summary.gpu_bytes, summary.cpu_bytes))
    words = f"{format_bytes(gpu)} on the GPU and {format_bytes(cpu)} in main memory"
    return [("neuron cache", f"up to {summary.cache.most_rows:,} swaps a token; {words}")]


def _texts(num_sequences: int) -> str:
    return f"{num_sequences} texts of " if num_sequences > 1 else ""


def _split_facts(summary: SplitSummary) -> list[Row]:
    used, dense = sum(summary.gpu_bytes.values()), sum(summary.dense_on_gpu)
    held, host = sum(summary.cpu_bytes.values()), summary.host_budget_bytes
    workspace = summary.cpu_bytes["workspace"]
    return [
        ("made for model", summary.model_id),
        ("made from profile", f"sha256 {summary.profile_sha256}"),
        ("made from machine file", f"sha256 {summary.machine_sha256}"),
        ("mode", summary.mode),
        ("context", f"{_texts(summary.num_sequences)}{summary.context_length:,} tokens"),
        *(
            [("keys and values", f"in main memory; {summary.kv_offload}")]
            if summary.kv_offload
            else []
        ),
        ("VRAM budget", f"{format_bytes(summary.vram_budget_bytes)}, used {format_bytes(used)}"),
        (
            "main memory",
            f"{format_bytes(host) if host else 'not limited'}, used {format_bytes(held)}",
        ),
        ("workspace", f"{format_bytes(workspace)} on every device that holds anything"),
        *_cache_facts(summary),
        ("status", summary.status),
        (
            "predicted",
            f"{summary.tokens_per_s:,.1f} tokens/s ({summary.objective_s:.6g} s a token)",
        ),
        ("bound", f"{summary.bound_s:.6g} s a token, gap {summary.gap:.2%}"),
        ("solved in", f"{summary.solve_s:.2f} s"),
        ("hot neurons", f"{sum(summary.num_hot_L):,}"),
        ("dense blocks on GPUs", f"{dense} of {len(summary.dense_on_gpu)}"),
        ("output head", _head_place(summary)),
    ]


def _head_place(summary: SplitSummary) -> str:
    if not summary.head_on_gpu:
        return "CPU"
    return f"GPU {summary.home[-1] if summary.home else 0}"


def _split_gpus(summary: SplitSummary) -> Table:
    """Each GPU with the first and the last layer that has something on it."""
    columns = ["GPU", "budget", "layers", "dense blocks", "hot neurons", "head"]
    return columns_table("GPUs", columns, [
        (number, format_bytes(gpu.budget_bytes),
         _range([layer for layer in gpu.layers if _has_any(summary, layer)]),
         gpu.num_dense, f"{gpu.num_hot:,}", "here" if gpu.has_head else "")
        for number, gpu in enumerate(summary.gpus)
    ])  # fmt: skip


def _has_any(summary: SplitSummary, layer: int) -> bool:
    return summary.dense_on_gpu[layer] or summary.num_hot_L[layer] > 0


def _range(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"


def _split_bytes(summary: SplitSummary) -> Table:
    rows: list[Row] = [
        (item, f"{gpu:,}", format_bytes(gpu), f"{summary.cpu_bytes[item]:,}",
         format_bytes(summary.cpu_bytes[item]))
        for item, gpu in summary.gpu_bytes.items()
    ]  # fmt: skip
    gpu, cpu = sum(summary.gpu_bytes.values()), sum(summary.cpu_bytes.values())
    rows.append(("all", f"{gpu:,}", format_bytes(gpu), f"{cpu:,}", format_bytes(cpu)))
    return columns_table("bytes", ["", "GPUs" if summary.home else "GPU", "", "CPU", ""], rows)


def _split_layers(summary: SplitSummary) -> Table:
    home = summary.home or (0,) * (len(summary.num_hot_L) + 1)
    return columns_table("layers", ["layer", "home", "hot neurons", "dense block"], [
        (layer, f"GPU {home[layer]}" if _has_any(summary, layer) else "CPU", f"{num_hot:,}",
         f"GPU {home[layer]}" if is_on_gpu else "CPU")
        for layer, (num_hot, is_on_gpu) in enumerate(
            zip(summary.num_hot_L, summary.dense_on_gpu, strict=True))
    ])  # fmt: skip


def _machine_facts(summary: MachineSummary) -> list[Row]:
    machine = summary.machine
    return [
        ("CPU", machine.cpu_name),
        ("threads", machine.num_threads),
        ("memory", f"{format_bytes(machine.memory_bytes)}, {format_bytes(machine.free_bytes)} free"),
        *((f"bandwidth, threads: {threads}", f"{_figure(rate)} GB/s")
          for threads, rate in machine.cpu_bandwidth_gb_per_s.items()),
        ("GPUs", len(machine.gpus) or "none"),
        *((f"version of {name}", version) for name, version in machine.versions.items()),
    ]  # fmt: skip


def _gpus(summary: MachineSummary) -> list[Table]:
    """Every figure under its name in the file, with the unit in the name."""
    return [
        facts_table(f"GPU {number}", [
            (name, _shown(value)) for name, value in figures.items()
        ])
        for number, figures in enumerate(summary.gpu_figures())
    ]  # fmt: skip


def _shown(value: object) -> str:
    if isinstance(value, Figure):
        return _figure(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _figure(figure: Figure) -> str:
    """The best value, and the range of the middle half of the rounds."""
    if figure.quartiles is None:
        return f"{figure.best:g} (not measured)"
    low, _, high = figure.quartiles
    return f"{figure.best:.4g} (half of {figure.rounds} rounds {low:.4g} to {high:.4g})"


def _span(values: Sequence[float], form: str = "g") -> str:
    """One number if all layers have the same, otherwise the range; "unknown" without values."""
    if not values:
        return "unknown"
    low, high = format(min(values), form), format(max(values), form)
    return f"{low} in all layers" if low == high else f"{low} to {high}"

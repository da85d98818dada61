"""Makes a page about a model on a machine, from the files of the other stages.

The sections are in `sections` and `quality_section`, the HTML in `page`."""

from importlib.metadata import version

from hotsplit.costs.default_mode import choose_mode, dense_bytes
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file, sha256_of
from hotsplit.files.gguf_parts import part_paths
from hotsplit.files.outputs import check_outputs
from hotsplit.model.modes import Mode
from hotsplit.model.spec_facts import spec_facts
from hotsplit.profile.report import report_path
from hotsplit.report.artifacts import Artifacts, load_artifacts
from hotsplit.report.page import Names, Page, Table, Tile, render
from hotsplit.report.quality_section import cost_of, costs_nothing, quality_section
from hotsplit.report.report_config import MAX_BYTES, ReportConfig, ReportSummary
from hotsplit.report.sections import (
    bytes_section,
    firing_section,
    machine_section,
    placement_section,
    predictor_section,
    rate,
    speed_section,
)
from hotsplit.report.speeds import Speeds, speeds_of
from hotsplit.system.sizes import format_bytes

NAME_KEY = "general.name"
NEEDS_EVAL = "needs a comparison (--eval-json)"


def report(config: ReportConfig) -> ReportSummary:
    """Writes the page. Raises HotsplitError for unrelated files, and for too large a page."""
    beside = () if config.profile is None else (report_path(config.profile),)
    check_outputs([config.output], force=config.force, inputs=(*config.inputs, *beside))
    found = load_artifacts(config)
    page = page_of(config, found)
    content = render(page).encode(errors="backslashreplace")  # names may have any bytes
    if len(content) > MAX_BYTES:
        raise HotsplitError(
            f"{config.output}: the page has {format_bytes(len(content))}, more than the"
            f" {format_bytes(MAX_BYTES)} that a page may have; give fewer files"
        )
    with partial_file(config.output) as partial:
        partial.write_bytes(content)
    return ReportSummary(
        output=str(config.output),
        model_id=found.model.model_id,
        num_bytes=len(content),
        num_plots=sum(len(section.plots) for section in page.sections),
        sections=tuple(section.name for section in page.sections),
        missing=tuple(s.name for s in page.sections if not s.plots and not s.tables),
    )


def page_of(config: ReportConfig, found: Artifacts) -> Page:
    speeds = speeds_of(config, found)
    names = Names(config, has_experts=found.model.spec.has_experts)
    mode = choose_mode(found.model).mode if found.split is None else found.split.mode
    # The headline, one sentence.
    split, cost = found.split, cost_of(found, mode)
    parts = [f"Runs in mode {mode}"]
    if split is not None:
        parts[0] += f" with {' and '.join(map(format_bytes, split.budgets))} of GPU memory"
        speed = f"{rate(split.objective_s)} tokens a second predicted"
        if speeds.advice is not None and any(split.gpu_bytes.values()):
            speed += f", {speeds.advice.cpu_only_s / split.objective_s:.2f} times the CPU alone"
        parts.append(speed)
    if cost is not None and mode != "dense":
        parts.append(f"perplexity {cost.perplexity_text} against dense")
    elif costs_nothing(mode):
        parts.append("the same text as the dense model")
    return Page(
        title=found.model.text(NAME_KEY) or config.model.name,
        facts=_facts(config, found),
        summary=", ".join(parts) + ".",
        tiles=(_runs(found, mode), _speed(found, speeds), _cost(found, mode), _reads(found, mode)),
        sections=(
            speed_section(found, speeds, names),
            placement_section(found, names),
            bytes_section(found, names),
            firing_section(found, names),
            predictor_section(found, names),
            quality_section(found, names),
            machine_section(found, names),
        ),
        files=Table(
            "Files",
            ("what", "name", "bytes", "sha256"),
            tuple(
                (what, part.name, f"{part.stat().st_size:,}", sha256_of(part)[:16])
                for what, path in found.paths
                for part in part_paths(path)
            ),
            num_texts=2,
        ),
        program=f"hotsplit {version('hotsplit')}",
    )


def _facts(config: ReportConfig, found: Artifacts) -> tuple[str, ...]:
    model, spec = found.model, found.model.bare_spec
    kinds = [entry.kind for entry in model.tensors.values() if len(entry.shape) > 1]
    kind = max(sorted(set(kinds)), key=kinds.count)
    size = sum(entry.num_bytes for entry in model.tensors.values())
    return (
        config.model.name,
        model.architecture,
        f"{spec.num_layers} layers of {spec.most_neurons:,} neurons",
        *(f"experts: {value}" for name, value in spec_facts(spec) if name == "experts"),
        f"hidden size {spec.hidden_size:,}",
        model.activation,
        f"{kind}, {format_bytes(size)}",
        "with predictors" if model.predictor else "no predictors",
    )


def _runs(found: Artifacts, mode: Mode) -> Tile:
    split, note = found.split, "unless another mode is asked for; no plan given"
    if split is not None:
        held, used = sum(split.cpu_bytes.values()), sum(split.gpu_bytes.values())
        note = f"on the CPU alone, {format_bytes(held)} of main memory"
        if used:
            gpus = "the GPU" if len(split.budgets) == 1 else f"{len(split.budgets)} GPUs"
            note = (
                f"{format_bytes(used)} of {format_bytes(sum(split.budgets))} on {gpus},"
                f" {format_bytes(held)} on the CPU"
            )
    return Tile("Runs as", mode, note, "mode")


def _speed(found: Artifacts, speeds: Speeds) -> Tile:
    label, split, advice = "Predicted speed", found.split, speeds.advice
    if split is not None:
        seconds, note = split.objective_s, "by the plan"
        if advice is not None:
            note = f"CPU alone {rate(advice.cpu_only_s)}, whole layers {rate(advice.layer_split_s)}"
    elif speeds.curve is not None:
        seconds, note = speeds.curve.cpu_only_s, "on the CPU alone; no plan given"
    else:
        return Tile(label, "unknown", "needs a plan (--split)")
    return Tile(label, rate(seconds), note, "tokens/s")


def _cost(found: Artifacts, mode: Mode) -> Tile:
    label, cost = "Cost in perplexity", cost_of(found, mode)
    if mode == "dense":
        return Tile(label, "none", "everything is computed")
    if cost is None and costs_nothing(mode):
        return Tile(label, "none", "what is left out is zero")
    if cost is None:
        return Tile(label, "unknown", NEEDS_EVAL)
    note = f"same top token {cost.agreement_text('.1%')}; by {cost.source}"
    half = cost.quality.perplexity_half_width
    return Tile(
        label,
        f"{cost.quality.perplexity_increase:+.2%}",
        note,
        "" if half is None else f"± {half:.2%}",
    )


def _reads(found: Artifacts, mode: Mode) -> Tile:
    label, cost = "A token reads", cost_of(found, mode)
    if mode == "dense" and found.model.spec.has_experts:
        whole = sum(entry.num_bytes for entry in found.model.tensors.values())
        return Tile(
            label,
            f"{dense_bytes(found.model) / whole:.0%}",
            "of the weights' bytes: no experts that the router does not choose",
        )
    if mode == "dense":
        return Tile(label, "100%", "of the weights' bytes")
    if cost is None:
        return Tile(label, "unknown", NEEDS_EVAL)
    note = f"of the dense model's bytes, on {cost.quality.num_tokens:,} tokens"
    return Tile(label, f"{cost.share_of_bytes:.1%}", note)

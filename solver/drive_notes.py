"""What a plan with experts on the drive says in words: what limits it, and what more memory brings.

Letters: L layers, F experts of a layer by rank, T recorded tokens, K experts of a token."""

from dataclasses import dataclass, replace
from typing import Literal

from hotsplit.artifacts.data_sheets import SOURCE
from hotsplit.artifacts.machine_file import Drive, Figure
from hotsplit.costs.part_bytes import is_expert
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.mode_choice import find
from hotsplit.solver.multi_gpu import Pipeline, PipelinePlacement, plan_seconds
from hotsplit.solver.scales import Scales, scaled
from hotsplit.system.sizes import format_bytes

MORE_BYTES = 16 << 30
Limit = Literal["drive", "memory", "card"]


@dataclass(frozen=True, kw_only=True)
class DriveUse:
    """Experts on the drive, and their bytes; the bytes of them that a token is expected to read;
    the rate of those reads in bytes per second; what would make a token fastest if it took half of
    its time; and the seconds of a token with so many more bytes of main memory."""

    num_on_drive: int
    num_experts: int
    drive_bytes: int
    read_bytes: float
    rate: float
    limit: Limit
    more_bytes: int
    more_s: float

    def line(self, seconds: float) -> str:
        """In words; `seconds`: of a token."""
        words = {"drive": "the drive", "memory": "the processor and its memory", "card": "the card"}
        gain = f"{1 / self.more_s:,.1f} tokens/s ({seconds / self.more_s - 1:+.0%})"
        return (
            f"limited by {words[self.limit]}: {self.num_on_drive:,} of {self.num_experts:,}"
            f" experts, {format_bytes(self.drive_bytes)}, are on the drive, of which a token reads"
            f" {format_bytes(round(self.read_bytes))} at {1e-9 * self.rate:.1f} GB/s;"
            f" {format_bytes(self.more_bytes)} more of main memory would bring {gain}"
        )


def drive_use(inputs: Inputs, pipeline: Pipeline, plan: PipelinePlacement) -> DriveUse | None:
    """What a plan reads from the drive; None if all of it is in memory."""
    placement, problem, drive = plan.placement, pipeline.model, inputs.drive
    if placement.resident_LF is None or drive is None:
        return None
    away_LF = ~placement.hot_LF & ~placement.resident_LF
    num_away_L, read_bytes, read_s = away_LF.sum(axis=1), 0.0, 0.0
    for layer in problem.replayed:
        rank_TK = problem.sides(layer).rank_TK
        num_read = float(away_LF[layer][rank_TK].sum(axis=1).mean())
        read_bytes += num_read * int(problem.neuron_bytes_L[layer])
        read_s += num_read * expert_read_seconds(inputs, drive, layer)
    larger = replace(inputs, host_budget=inputs.host_budget + MORE_BYTES)
    more_s = find(larger, time_limit_s=0.0).answer.objective_s
    seconds = plan_seconds(pipeline, plan)
    return DriveUse(
        num_on_drive=int(num_away_L.sum()),
        num_experts=len(problem.replayed) * problem.num_neurons,
        drive_bytes=int(num_away_L @ problem.neuron_bytes_L),
        read_bytes=read_bytes,
        rate=read_bytes / read_s if read_s else 1.0,
        limit=_limit(inputs, plan),
        more_bytes=MORE_BYTES,
        more_s=min(more_s, seconds),
    )


def expert_read_seconds(inputs: Inputs, drive: Drive, layer: int) -> float:
    """Seconds to read an expert of a layer, matrix by matrix."""
    number = inputs.model.spec.layers[layer].neurons.num_experts
    return sum(
        drive.read_seconds(entry.num_bytes / number)
        for name, entry in inputs.model.layer_tensors[layer].items()
        if is_expert(name)
    )


def drive_words(inputs: Inputs) -> str | None:
    """Where the figures of the drive are from, if not from a measurement of the model's own."""
    drive = inputs.drive
    assert drive is not None
    rate = drive.best_reads(1 << 20).gb_per_s.median
    if drive.source == SOURCE:
        return (
            f"{drive.name} is assumed, {rate:.1f} GB/s of direct reads ({drive.source}); hotsplit"
            " calibrate --drive PATH measures one"
        )
    path = inputs.paths[0]
    if drive.kind in ("rotating", "network"):
        return f"the drive {drive.name} is {drive.kind}: {rate:.2g} GB/s"
    if path.exists() and inputs.machine.drive_at(path) is not drive:
        return f"the drive of {path} was not measured: the figures are those of {drive.name}"
    return None


def _limit(inputs: Inputs, plan: PipelinePlacement) -> Limit:
    machine = inputs.machine
    halves = {
        "drive": replace(machine, drives=tuple(map(_faster, machine.drives))),
        "memory": scaled(machine, Scales(cpu=0.5)),
        "card": scaled(machine, Scales(gpu=0.5, hand_over=0.5)),
    }
    found: dict[Limit, float] = {
        name: plan_seconds(replace(inputs, machine=other).pipeline(), plan)  # type: ignore[misc]
        for name, other in halves.items()
    }
    return min(found, key=lambda name: found[name])


def _faster(drive: Drive) -> Drive:
    reads = tuple(
        replace(each, gb_per_s=Figure(best=2 * each.gb_per_s.median)) for each in drive.reads
    )
    return replace(drive, reads=reads)

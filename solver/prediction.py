"""The predicted seconds of an existing plan by part, and what a machine's figures must be scaled by
to explain what was measured."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from hotsplit.artifacts.split_file import Split
from hotsplit.artifacts.trial_file import Winner
from hotsplit.errors import DoesNotFitError
from hotsplit.solver import multi_gpu
from hotsplit.solver.draft_prediction import rows_seconds, shares
from hotsplit.solver.inputs import Inputs, Workspace, load_inputs
from hotsplit.solver.mode_choice import Found, obvious_plans
from hotsplit.solver.optimise import Answer
from hotsplit.solver.problem import SolvedPlacement
from hotsplit.solver.scales import Scales, scaled
from hotsplit.solver.solve import split_of
from hotsplit.solver.solver_config import SolveConfig
from hotsplit.system.sizes import format_bytes


def inputs_for(split: Split, config: SolveConfig, workspace: Workspace) -> Inputs:
    """The inputs of the files of `config` for the mode and the budgets of a plan made from them."""
    inputs = load_inputs(replace(config, mode=split.mode), workspace)
    return replace(inputs, context_length=split.context_length, budgets=split.budgets)


def placement_of(split: Split, inputs: Inputs) -> multi_gpu.PipelinePlacement:
    """The plan's placement, with its neurons by rank."""
    hot_LF = np.stack([inputs.units.is_hot(layer, ids) for layer, ids in enumerate(split.hot)])
    resident_LF = None
    if split.resident_experts:
        resident_LF = ~hot_LF
        for layer, ids in enumerate(split.resident_experts):
            if ids is not None:
                resident_LF[layer] = inputs.units.is_hot(layer, ids)
    home = split.home or (0,) * (len(split.hot) + 1)
    return multi_gpu.PipelinePlacement(
        placement=SolvedPlacement(
            hot_LF=hot_LF,
            dense_L=np.array(split.dense_on_gpu),
            head=split.head_on_gpu,
            resident_LF=resident_LF,
        ),
        home_I=np.array(home, np.int64),
    )


def parts_of(split: Split, inputs: Inputs) -> dict[str, float]:
    """The predicted seconds of a plan on the CPU, in hand-overs and on the GPU, whose sum is the
    plan's. What overlaps counts where the token waits: a part is what the token would take less if
    the part took no time, after the parts before it took none."""
    placement, left = placement_of(split, inputs), inputs
    seconds = multi_gpu.plan_seconds(inputs.pipeline(), placement)
    parts, none = {}, 1e-9
    for name in ("hand_over", "cpu"):
        left = replace(left, machine=scaled(left.machine, Scales(**{name: none})))
        now_s = multi_gpu.plan_seconds(left.pipeline(), placement)
        parts[name] = seconds - now_s
        seconds = now_s
    return parts | {"gpu": seconds}


def cpu_alone_seconds(inputs: Inputs) -> float:
    pipeline = inputs.pipeline()
    return multi_gpu.plan_seconds(pipeline, multi_gpu.cpu_only_plan(pipeline))


def prompt_seconds(inputs: Inputs, num_tokens: int) -> float | None:
    """Seconds of a prompt that the CPU computes, without its attention; None if the machine's
    figures have no rates of prompts."""
    model, machine = inputs.model, inputs.machine
    if not machine.costs.pass_rows_gb_per_s:
        return None
    layers_s = rows_seconds(model, machine, shares(inputs), num_tokens, head_share=0.0)
    head = model.tensors[model.head_name]
    return layers_s + head.num_bytes / machine.cpu_rate(head.kind)


def check_whole_host(inputs: Inputs) -> None:
    """Raises DoesNotFitError unless main memory can hold the whole model with its context."""
    pipeline = inputs.pipeline()
    if pipeline.need_bytes > 0:
        num_bytes = pipeline.model.placeable_bytes + inputs.always_on_host
        raise DoesNotFitError(f"it takes {format_bytes(num_bytes)}; there are {inputs.host_words}")


def _are_equal(one: multi_gpu.PipelinePlacement, other: multi_gpu.PipelinePlacement) -> bool:
    a, b = one.placement, other.placement
    are_there = np.array_equal(a.hot_LF, b.hot_LF) and np.array_equal(a.dense_L, b.dense_L)
    return are_there and a.head == b.head and np.array_equal(one.home_I, other.home_I)


def write_obvious(plan: Split, inputs: Inputs, paths: Mapping[Winner, Path]) -> dict[Winner, float]:
    """Writes the obvious plans that fit, have anything on a GPU and are not `plan`, each to its
    path; returns the seconds of a token that they are predicted to take."""
    pipeline, planned = inputs.pipeline(), placement_of(plan, inputs)
    predicted_s: dict[Winner, float] = {}
    for name, other in obvious_plans(inputs).items():
        is_new = other.placement.uses_gpu and not _are_equal(other, planned)
        if is_new and multi_gpu.plan_is_feasible(pipeline, other):
            seconds = multi_gpu.plan_seconds(pipeline, other)
            answer = Answer(status="bounded", plan=other, objective_s=seconds, bound_s=0.0)
            found = Found(inputs=inputs, pipeline=pipeline, answer=answer, others=())
            split_of(found, solve_s=0.0).save(paths[name])
            predicted_s[name] = seconds
    return predicted_s

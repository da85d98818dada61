"""Loads what a layer has for its planes, what begins and ends them, and products of low rank."""

import torch

from hotsplit.model import planes as names
from hotsplit.model.spec import LowRank as LowRankSpec
from hotsplit.model.spec import PredictPlanes
from hotsplit.runtime.model.delta_loader import Reader
from hotsplit.runtime.ops.planes import LowRank, PlaneEnds, Planes
from hotsplit.runtime.weights.matrix import Linear
from hotsplit.runtime.weights.store import CPU


def load_planes(load: Reader, index: int, device: torch.device) -> Planes | None:
    """Those of a layer, on its device; None if the hidden state has one plane."""
    blocks = load.model.spec.layers[index].blocks
    block = next((block for block in blocks if isinstance(block, PredictPlanes)), None)
    if block is None:
        return None
    predict_QP, correct_PP, scale_D = (
        load.vector(f"blk.{index}.{name}.weight", device)
        for name in (names.PREDICT, names.CORRECT, names.SCALE)
    )
    assert predict_QP is not None and correct_PP is not None and scale_D is not None
    return Planes(
        norm=load.norm(block.norm, f"blk.{index}.{block.norm.name}", device),
        router=load.linear(index, names.ROUTER, device),
        predict_QP=predict_QP,
        correct_PP=correct_PP,
        scale_D=scale_D,
        on_bytes=load.count_attention,
    )


def load_low_rank(load: Reader, index: int, device: torch.device) -> LowRank | None:
    """The product of low rank of a layer; None without one."""
    if not any(isinstance(block, LowRankSpec) for block in load.model.spec.layers[index].blocks):
        return None
    left, right = (load.linear(index, name, device) for name in (names.LEFT, names.RIGHT))
    return LowRank(left=left, right=right, on_bytes=load.count_attention)


def load_ends(load: Reader) -> PlaneEnds | None:
    """What begins and ends the planes, on the CPU; None if there is one."""
    if load.model.spec.num_planes == 1:
        return None
    begin, end = (
        tuple(
            Linear(weight=load.matrix(load.model.tensors[f"{name}.{plane}.weight"], CPU))
            for plane in range(load.model.spec.num_planes - 1)
        )
        for name in (names.BEGIN, names.END)
    )
    return PlaneEnds(begin=begin, end=end)

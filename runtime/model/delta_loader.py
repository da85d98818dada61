"""Loads the parts of a gated delta net."""

import numpy as np
import torch

from hotsplit.files.gguf_file import chosen_rows
from hotsplit.model.spec import DeltaNet as DeltaSpec
from hotsplit.model.spec import Norm as NormSpec
from hotsplit.model.tensors import CONV, DECAY, DECAY_BIAS, DELTA_NORM
from hotsplit.runtime.cache.state_slots import LayerState
from hotsplit.runtime.ops.delta.block import DeltaNet
from hotsplit.runtime.ops.reader import Reader
from hotsplit.runtime.weights.matrix import Linear


def load_delta(load: Reader, index: int, block: DeltaSpec, device: torch.device) -> DeltaNet:
    conv_CJ, decay_V, bias_V = (
        load.own_vector(f"blk.{index}.{name}", device) for name in (CONV, DECAY, DECAY_BIAS)
    )
    beta, alpha = _gates(load, index, block, device)
    norm = NormSpec(name=DELTA_NORM, kind="rms", size=block.value_head_dim, epsilon=block.epsilon)
    return DeltaNet(
        spec=block,
        qkv=load.linear(f"blk.{index}.attn_qkv", device),
        gate=load.linear(f"blk.{index}.attn_gate", device),
        beta=beta,
        alpha=alpha,
        output=load.linear(f"blk.{index}.ssm_out", device),
        conv_CJ=conv_CJ,
        decay_V=decay_V,
        decay_bias_V=bias_V,
        norm=load.norm(norm, f"blk.{index}.{DELTA_NORM}", device),
        state=LayerState.of(
            load.num_sequences, block.state_shape, block.conv_shape, load.stores.on(device).cache
        ),
    )


def _gates(
    load: Reader, index: int, block: DeltaSpec, device: torch.device
) -> tuple[Linear, Linear]:
    """The matrices of beta and alpha, perhaps of rows of the one that has both."""
    if not block.is_grouped:
        return load.linear(f"blk.{index}.ssm_beta", device), load.linear(
            f"blk.{index}.ssm_alpha", device
        )
    both = load.model.tensors[f"blk.{index}.ssm_ba.weight"]
    rows_G2R = np.arange(both.shape[0]).reshape(block.num_key_heads, 2, -1)

    def of(part: int) -> Linear:
        rows = rows_G2R[:, part].flatten()
        return Linear(weight=load.matrix(chosen_rows(both, rows), device))

    return of(0), of(1)

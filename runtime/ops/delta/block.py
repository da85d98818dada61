"""The gated delta net in torch, which is its definition (hotsplit.model.spec.DeltaNet).

Letters: T tokens, D model width, G key heads, V value heads, N key width, M value width, C channels,
J taps."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from hotsplit.model.spec import DeltaNet as DeltaSpec
from hotsplit.runtime.cache.state_slots import NO_SLOT, LayerState, StateRun
from hotsplit.runtime.ops.delta.gpu import delta_tokens
from hotsplit.runtime.ops.norm import Norm
from hotsplit.runtime.weights import gpu_products
from hotsplit.runtime.weights.matrix import Linear, side_by_side

NORM_EPSILON = 1e-6  # of queries and keys; llama.cpp and transformers have the same


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """A loaded delta net. The matrices of beta and alpha have a row for each value head, in order."""

    spec: DeltaSpec
    qkv: Linear
    gate: Linear
    beta: Linear
    alpha: Linear
    output: Linear
    conv_CJ: Tensor  # f32, as are the others
    decay_V: Tensor  # ssm_a: below zero
    decay_bias_V: Tensor
    norm: Norm  # of each head's output
    state: LayerState
    on_bytes: Callable[[int], None] = field(repr=False)  # receives weight bytes read by the CPU

    @property
    def inputs(self) -> tuple[Linear, ...]:
        return self.qkv, self.gate, self.beta, self.alpha

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of values per token: of the input projections together, and of the outputs of the
        heads."""
        return sum(linear.weight.num_rows for linear in self.inputs), self.spec.value_size

    def forward(
        self,
        x: Tensor | gpu_products.Factor,
        on_heads: Callable[[Tensor], None],
        *,
        slots: StateRun,
    ) -> Tensor:
        """The output [T, D] for T normed tokens of a sequence, which begin with the state in a slot and
        store it in others. `on_heads` receives what the output is the projection of, [T, V * M]."""
        projected_TW = self._project(self.inputs, x)
        if gpu_products.is_gpu(projected_TW.device):
            heads_TZ = delta_tokens(self, projected_TW, slots.on(projected_TW.device))
        else:
            heads_TZ = self._mix(projected_TW, slots)
        on_heads(heads_TZ)
        return self._project((self.output,), heads_TZ)

    def _mix(self, projected_TW: Tensor, slots: StateRun) -> Tensor:
        """Turns projections into the gated outputs of the heads [T, V * M], on the CPU."""
        sizes = [linear.weight.num_rows for linear in self.inputs]
        qkv_TC, z_TZ, beta_TV, alpha_TV = projected_TW.split(sizes, dim=1)
        state_VNM, conv_JC = self._begin(slots.reads)
        input_UC = torch.cat([conv_JC, qkv_TC])  # with those before the first token
        taps, size, spec = len(conv_JC) + 1, len(qkv_TC), self.spec
        mixed_TC = mixed(input_UC, self.conv_CJ)
        key_V = key_heads(spec).to(mixed_TC.device)
        query_TVN, key_TVN, value_TVM = heads_of(mixed_TC, spec, key_V)
        decay_TV = (self.decay_V * softplus(alpha_TV + self.decay_bias_V)).exp()
        beta_TV, out_TVM = beta_TV.sigmoid(), torch.empty_like(value_TVM)
        for t in range(size):
            state_VNM, out_TVM[t] = token(
                state_VNM, query_TVN[t], key_TVN[t], value_TVM[t], beta_TV[t], decay_TV[t]
            )
            if (slot := slots.writes[t]) != NO_SLOT:
                self.state.state_SVNM[slot] = state_VNM
                self.state.conv_SJC[slot] = input_UC[t + 1 : t + taps]
        return self.norm.apply(out_TVM).flatten(1) * silu(z_TZ)

    def _begin(self, slot: int) -> tuple[Tensor, Tensor]:
        """The state [V, N, M] and the inputs of the convolution [J - 1, C] in a slot; zeros for
        none."""
        state, conv = self.state.state_SVNM, self.state.conv_SJC
        if slot == NO_SLOT:
            return torch.zeros_like(state[0]), torch.zeros_like(conv[0])
        return state[slot], conv[slot]

    def _project(self, linears: tuple[Linear, ...], x: Tensor | gpu_products.Factor) -> Tensor:
        if not gpu_products.is_gpu(x.device):
            self.on_bytes(sum(linear.weight.num_bytes for linear in linears))
        return side_by_side(linears, x)


def mixed(input_UC: Tensor, conv_CJ: Tensor) -> Tensor:
    """The convolution [T, C] of inputs [J - 1 + T, C], summed from the oldest to the newest, and its
    activation."""
    taps = conv_CJ.shape[1]
    size = len(input_UC) - taps + 1
    sum_TC = input_UC[:size] * conv_CJ[:, 0]
    for tap in range(1, taps):
        sum_TC = sum_TC + input_UC[tap : tap + size] * conv_CJ[:, tap]
    return silu(sum_TC)


def key_heads(spec: DeltaSpec) -> Tensor:
    """The key head that each value head reads, int64 [V]."""
    head_V, count = torch.arange(spec.num_value_heads), spec.num_key_heads
    return head_V // (spec.num_value_heads // count) if spec.is_grouped else head_V % count


def heads_of(mixed_TC: Tensor, spec: DeltaSpec, key_V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [T, V, N], of length 1 / sqrt(N) and 1, and values [T, V, M]."""
    sizes = [spec.key_size, spec.key_size, spec.value_size]
    query, key, value = mixed_TC.split(sizes, dim=1)
    query, key = (_unit(x.unflatten(1, (-1, spec.key_head_dim)))[:, key_V] for x in (query, key))
    query = query / spec.key_head_dim**0.5
    return query, key, value.unflatten(1, (-1, spec.value_head_dim))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def token(
    state_VNM: Tensor,
    query_VN: Tensor,
    key_VN: Tensor,
    value_VM: Tensor,
    beta_V: Tensor,
    decay_V: Tensor,
) -> tuple[Tensor, Tensor]:
    """(the state after a token, its output [V, M])."""
    state_VNM = state_VNM * decay_V[:, None, None]
    known_VM = (key_VN[:, None] @ state_VNM)[:, 0]
    delta_VM = beta_V[:, None] * (value_VM - known_VM)
    state_VNM = state_VNM + key_VN[:, :, None] * delta_VM[:, None]
    return state_VNM, (query_VN[:, None] @ state_VNM)[:, 0]

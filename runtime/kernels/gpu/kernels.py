"""The kernels of a decode step on a GPU, as one record of functions: a step can run on Triton's
kernels, on torch's or on the float64 reference.

All of them write to given tensors. Triton's allocate nothing and do not synchronise. They launch on
the current stream of torch's current device, which must be the tensors' device; their grids depend
only on shapes, so a captured CUDA graph stays valid for every position and every set of neurons.
Vectors are contiguous f32 unless stated otherwise; rows of matrices may be strided.

A step computes T rows, T in `ROWS`. With T > 1, every vector of a row becomes [T, ...] (step_rows.AXES;
sums of parts become [P, T, D]), an index or position becomes [T], and rows of outputs of `dot` may be
strided. A row's result is bit-identical for every T and whatever the other rows are; for K-quants it is
equal up to the f32 rounding of terms, because the compiler fuses different operations for different T. A
row may repeat the previous one.

The cache of one sequence is [C, K, W]; that of several sequences is in blocks [B, C, K, W]: position p of
sequence s is in block table_SN[s, p // C], int32 on the device, where C is a multiple of 64.

A matrix has the `gpu_kind` of one of hotsplit.model.weight_types (hotsplit.runtime.kernels.planar).

Letters: T rows of a step, D width, F neurons of the layer or of an expert, E experts of the layer, K
experts of a row, N rows of a matrix or neurons of a block, R rank, H heads, K key-value heads, W head
width, C positions of the cache or of one of its blocks, S parts of a sum, P rows to add, A chosen rows, B
words of 32 bits or blocks of a cache; table_SN: S sequences, N blocks of one."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from hotsplit.model.blocks import PLAIN_SUM, SumFactors
from hotsplit.model.spec import Attention
from hotsplit.model.weight_types import TYPES
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu.delta_kernels import Convolve, DeltaRule, GateNorm
from hotsplit.runtime.kernels.gpu.expert_kernels import ChooseExperts, ExpertDown, ExpertGateUp
from hotsplit.runtime.kernels.gpu.launch import overlapping
from hotsplit.runtime.kernels.gpu.own_kernels import Own
from hotsplit.runtime.kernels.stored import NO_VECTORS, StoredMatrix, Vectors

ROWS = (1, 2, 4, 8, 16, 32)
# Kinds of matrices for which a row's rounding depends on T.
INEXACT_ROWS = tuple(
    sorted({kind for t in TYPES if not t.has_exact_rows for kind in (t.name, t.gpu_kind)})
)


class Dot(Protocol):
    def __call__(
        self,
        matrix: StoredMatrix,
        bias_N: Tensor | None,
        x_D: Tensor,
        out_N: Tensor,
        *,
        has_relu: bool = False,
        cap: float | None = None,
    ) -> None:
        """out = W x + bias, then max(0, .) if `has_relu`, or cap * tanh(. / cap); NaN stays NaN."""


class Embed(Protocol):
    def __call__(
        self,
        matrix: StoredMatrix,
        index_1: Tensor,
        out_D: Tensor,
        *,
        is_added: bool = False,
        scale: float = 1.0,
    ) -> None:
        """out = scale * row index_1[0] (int64 on the device), or out += that."""


class Unpack(Protocol):
    def __call__(self, matrix: StoredMatrix, out_AD: Tensor, index_A: Tensor | None = None) -> None:
        """Unpacks the rows (those at `index_A`, int64 or int32, if given) to f32, f16 or bf16;
        output rows may be strided too. Also takes types with a planar layout as stored in files,
        and all rows of the CPU's tiles and groups (kernels.tiled, kernels.grouped)."""


class AddNorm(Protocol):
    def __call__(
        self,
        x_D: Tensor,
        parts_PD: Tensor | None,
        weight_D: Tensor | None,
        bias_D: Tensor | None,
        epsilon: float,
        out_D: Tensor | None,
        x_out_D: Tensor | None,
        term_D: Tensor | None = None,
        copy_D: Tensor | None = None,
        factors: SumFactors = PLAIN_SUM,
    ) -> None:
        """t = the sum, with these factors, of x and of the others, the rows of `parts_PD` and term; x_out = t,
        and out = copy = norm(t), by ops.norm.Norm; each optional, but a copy needs `out_D`. `x_out_D` and
        `out_D` may be `x_D`; rows of these may be strided. `term_D`, `copy_D` and `x_out_D` may be in pinned
        memory of the host."""


class RotateAppend(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        frequency_W2: Tensor | None,
        query_weight_W: Tensor | None,
        key_weight_W: Tensor | None,
        position_1: Tensor,
        key_CKW: Tensor,
        value_CKW: Tensor,
        spec: Attention,
        sequence_1: Tensor | None = None,
        table_SN: Tensor | None = None,
        query_THW: Tensor | None = None,
    ) -> None:
        """What `spec` does with q, k and v before attention. The norm of each head of q and k has weights
        [W], or [H, W] and [K, W]; the first pairs of a head, as many as there are f64 frequencies, rotate;
        both optional. `qkv` is f32 [(H + 2 K) W]: q is updated in place, k and v are written to the cache,
        f32 or f16, at `position_1` (int64 on the device) of `sequence_1` (int32). If `spec` is gated, W
        gates of its output are behind each head of q, [(2 H + 2 K) W]; if values are keys, it is [(H + K)
        W]. A prompt's pass has any number T of rows. `query_THW`, if given, takes q times the scale of
        scores, and `qkv` stays."""


class Attend(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        key_CKW: Tensor,
        value_CKW: Tensor,
        position_1: Tensor,
        spec: Attention,
        scratch: Tensor,
        out_HW: Tensor,
        sequence_1: Tensor | None = None,
        table_SN: Tensor | None = None,
        *,
        vectors: Vectors = NO_VECTORS,
    ) -> None:
        """The attention of `spec` to the positions up to `position_1` inclusive, times the sigmoid of the
        gates, if any. `vectors`: those of the spec, f32, by its names. Triton reads no tile of 64 keys before
        the window. `scratch` is f32 with at least `attend_scratch` values per row."""


class AttendTokens(Protocol):
    def __call__(
        self,
        query_THW: Tensor,
        key_CKW: Tensor,
        value_CKW: Tensor,
        position_T: Tensor,
        spec: Attention,
        out_THW: Tensor,
        sequence_1: Tensor | None = None,
        table_SN: Tensor | None = None,
        *,
        vectors: Vectors = NO_VECTORS,
        gated_TQ: Tensor | None = None,
    ) -> None:
        """`attend` for the tokens of a prompt, of one sequence at ascending positions: `sequence_1`
        may have several values, which are equal. Queries are scaled and have the type of keys and
        values, to which shares are rounded, too; sums are f32. `gated_TQ`: `qkv` of RotateAppend, if
        it has gates. A token's result has the same bits in every pass."""


class Predict(Protocol):
    def __call__(
        self,
        up: StoredMatrix,
        bias_F: Tensor | None,
        inner_R: Tensor,
        threshold: float,
        named_B: Tensor,
        copy_B: Tensor | None = None,
    ) -> None:
        """Writes `named_B`, int32 [ceil(F / 32)]: bit j % 32 of word j // 32 is 1 if neuron j is
        predicted. `copy_B`: the same again, for example in pinned memory of the host.

        Its score is up_j inner + bias; it is predicted unless score <= threshold. Bits past F are
        0."""


class GateUp(Protocol):
    def __call__(
        self,
        gate: StoredMatrix,
        gate_bias_N: Tensor | None,
        up: StoredMatrix | None,
        up_bias_N: Tensor | None,
        id_N: Tensor | None,
        named_B: Tensor | None,
        x_D: Tensor,
        rule: Gate,
        hidden_N: Tensor,
    ) -> None:
        """hidden_j = act(gate_j x + bias) (up_j x + bias), as in
        hotsplit.runtime.kernels.gate.Gate.

        It is 0 for neurons that are not predicted and, unless `rule` computes all, for those that do
        not fire. With Triton, the rows of the former and the up rows of the latter are not read, unless
        another row of the step needs them. `id_N`, int32: the neurons' ids in the layer, which
        index `named_B`; None: 0, 1, ..."""


class Down(Protocol):
    def __call__(
        self, down: StoredMatrix, hidden_N: Tensor, parts_SD: Tensor, *, skips_zeros: bool
    ) -> None:
        """Row s of `parts_SD` is the sum of hidden_j down_j over the s-th range of ceil(N / S)
        neurons, zeros if the range is empty. With `skips_zeros`, neurons whose hidden value is 0
        are left out and their rows not read. `add_norm` adds the parts."""


class Multiply(Protocol):
    def __call__(
        self,
        matrix: StoredMatrix,
        bias_N: Tensor | None,
        x_TD: Tensor,
        power_T: Tensor | None,
        out_TN: Tensor,
        *,
        tile_G3: Tensor | None = None,
        row_2P: Tensor | None = None,
        factor_P: Tensor | None = None,
        tile_size: int = 0,
    ) -> None:
        """out = power (x W^T) + bias, for any number of tokens T; weights are rounded to the type of
        `x_TD`, f16 for a matrix in blocks. Rows of `x_TD` and `out_TN` may be strided.

        With `tile_G3` and `row_2P`, int32: the matrix has the N rows of one expert after those of
        another, and pair p of a token and an expert multiplies row row_2P[0, p] of `x_TD` and writes
        row row_2P[1, p] of `out_TN`, times its `factor_P`, of rows of `out_TN`, if given. See
        expert_pairs.Pairs. Then the matrix may be in the CPU's tiles and groups."""


class MultiplyDown(Protocol):
    def __call__(
        self,
        matrix: StoredMatrix,
        hidden_TN: Tensor,
        power_T: Tensor | None,
        out_TD: Tensor,
        *,
        is_added: bool,
        bias_D: Tensor | None = None,
        tile_G3: Tensor | None = None,
        row_2P: Tensor | None = None,
        factor_P: Tensor | None = None,
        tile_size: int = 0,
    ) -> None:
        """out = power (hidden W), or out += that; otherwise as Multiply. Experts, of which each has as
        many rows as `hidden_TN` has columns, may have a bias, and nothing is added to `out_TD`."""


class RoundTokens(Protocol):
    def __call__(
        self,
        x_TD: Tensor,
        added_TD: Tensor | None,
        weight_D: Tensor | None,
        bias_D: Tensor | None,
        epsilon: float,
        out_TD: Tensor,
        power_T: Tensor | None,
        x_out_TD: Tensor | None,
    ) -> None:
        """t = x + added; x_out = t; out = norm(t), or t without a weight, in the type of `out_TD`.
        `power_T`, if given, takes the power of two at or below the largest magnitude of each token,
        by which its values are divided before they are rounded. Any number of tokens. Rows of `x_TD` and
        `out_TD`, which may be `x_TD`, may be strided."""


class HiddenTokens(Protocol):
    def __call__(
        self,
        gate_TN: Tensor,
        up_TN: Tensor | None,
        named_TN: Tensor | None,
        rule: Gate,
        out_TN: Tensor,
        power_T: Tensor | None,
    ) -> None:
        """The hidden values of GateUp for any number of tokens, from the products with gate and up, of all
        gates of a layer if `rule` needs them; `named_TN`: bool. Rounded and divided as by RoundTokens.
        `out_TN` may be `up_TN`, and `gate_TN` unless all gates are needed."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    dot: Dot
    embed: Embed
    unpack: Unpack
    add_norm: AddNorm
    rotate_append: RotateAppend
    attend: Attend
    attend_tokens: AttendTokens
    predict: Predict
    gate_up: GateUp
    down: Down
    choose_experts: ChooseExperts
    expert_gate_up: ExpertGateUp
    expert_down: ExpertDown
    convolve: Convolve
    delta_rule: DeltaRule
    gate_norm: GateNorm
    multiply: Multiply
    multiply_down: MultiplyDown
    round_tokens: RoundTokens
    hidden_tokens: HiddenTokens
    own: Own  # those that only one kind of operation launches


NAMES = tuple(each.name for each in fields(Kernels) if each.name != "own")


def kernels_in(*modules: ModuleType, own: Own) -> Kernels:
    """The kernels that some modules define, each by its name."""

    def of(name: str) -> Any:
        found = (getattr(module, name, None) for module in modules)
        names = [module.__name__ for module in modules]
        return next(f for f, n in zip(found, names, strict=True) if f and f.__module__ == n)

    return Kernels(**{name: of(name) for name in NAMES}, own=own)


def triton_kernels() -> Kernels:
    """Triton's kernels, on the current CUDA device, or in its interpreter (TRITON_INTERPRET=1).

    The first call for each combination of widths, types, alignments, options and T compiles,
    which fails during graph capture, so run the step once before. The numbers of neurons
    and of a matrix's rows count only where they change tile sizes or numbers of parts.
    Raises ImportError with one line if Triton is missing."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the GPU kernels need Triton, found none ({error}): pip install triton"
        ) from error
    from hotsplit.runtime.kernels.gpu import (
        attention,
        delta,
        experts,
        heads,
        neurons,
        norm,
        predictor,
        products,
        prompt_attention,
        routing,
        rows,
        tokens,
    )

    return kernels_in(
        attention,
        delta,
        experts,
        heads,
        neurons,
        norm,
        predictor,
        products,
        prompt_attention,
        routing,
        rows,
        tokens,
        own=lambda kernel: kernel.triton,
    )


def overlapped(kernels: Kernels) -> Kernels:
    """Triton's kernels, each of which begins while the one before in its stream still runs
    (overlap.py); for steps alone, whose weights no kernel writes."""

    def within(kernel: Callable[..., None]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            with overlapping():
                kernel(*arguments, **options)

        return launch

    return Kernels(
        **{name: within(getattr(kernels, name)) for name in NAMES},
        own=lambda kernel: within(kernels.own(kernel)),
    )


def reference_kernels() -> Kernels:
    """Reference kernels in float64 with torch, on any device, which define the others' results."""
    from hotsplit.runtime.kernels.gpu import delta_reference as deltas
    from hotsplit.runtime.kernels.gpu import expert_kernels as experts
    from hotsplit.runtime.kernels.gpu import product_reference as products
    from hotsplit.runtime.kernels.gpu import reference

    return kernels_in(reference, products, experts, deltas, own=lambda kernel: kernel.reference)

"""The GPU kernels for several rows of a step: each row has the bits that the kernel for one row
gives it, whatever the other rows and their number. Products with K-quants may differ in the last
bits. Other tests compare the kernel for one row with float64.

The kernels run on a CUDA device, or in Triton's interpreter if there is none. test_ptx_kernels.py
runs some of these comparisons with the kernels executed as PTX."""

import inspect

import pytest
import torch
from gpu_matrices import (
    KINDS,
    NAN,
    REFERENCE,
    assert_close,
    block_width,
    device,
    heads_of,
    make_matrix,
    vector,
)

from hotsplit.runtime.device.bits import pack_bits
from hotsplit.runtime.kernels.gate import Gate
from hotsplit.runtime.kernels.gpu import ranges
from hotsplit.runtime.kernels.gpu.kernels import KERNELS
from hotsplit.runtime.kernels.gpu.launch import ROWS

# Groups of two and of four rows, and several groups.
KINDS_AND_ROWS = [
    *((kind, 2) for kind in KINDS),
    ("q4_0_planar", 4),
    ("f16", 8),
    ("q8_0_planar", 8),
]

# Rows of all kinds are unpacked as in `dot`.
SOME_KINDS = [("f16", 8), ("q4_0_planar", 4), ("q4_k", 2)]

pytestmark = pytest.mark.usefixtures("several_rows")


def vectors(num_rows, width, seed=1):
    """[T, D]"""
    return vector(num_rows * width, seed).view(num_rows, width)


def single(kernel: str, given: dict, row: int) -> dict:
    """The arguments for one row, copied, so that its vectors begin at multiples of 16 bytes."""
    own = dict(given)
    for name, axis in KERNELS[kernel].axes.items():
        if own.get(name) is None:
            continue
        if name in ("index_1", "position_1", "sequence_1"):
            own[name] = own[name][row : row + 1].clone()
        else:
            own[name] = own[name].select(axis, row).clone()
    return own


def outputs(kernel: str, given: dict) -> list[str]:
    names = ("out_N", "out_D", "x_out_D", "out_HW", "qkv", "named_B", "hidden_N", "parts_SD")
    return [n for n in names if n in KERNELS[kernel].axes and n in given and given[n] is not None]


def assert_rows_as_alone(which, kernel: str, *, is_exact: bool = True, **given) -> dict:
    """Compares the kernel run once for all rows with one run per row; returns the arguments of the
    former, outputs included. Arguments that are not given are None. Unless `is_exact`, the last
    bits may differ."""
    parameters = inspect.signature(KERNELS[kernel].reference).parameters.values()
    given = {p.name: None for p in parameters if p.default is p.empty} | given
    num_rows = KERNELS[kernel].num_rows(given)
    alone = [single(kernel, given, row) for row in range(num_rows)]
    getattr(which, kernel)(**given)
    for row, own in enumerate(alone):
        getattr(which, kernel)(**own)
        for name in outputs(kernel, given):
            got, want = given[name].select(KERNELS[kernel].axes[name], row), own[name]
            if not is_exact and got.dtype.is_floating_point:
                assert ((got - want).abs() <= 1e-5 * want.abs().max()).all(), (name, row)
                continue
            assert torch.equal(got.nan_to_num(), want.nan_to_num()), (name, row)
            assert torch.equal(got.isnan(), want.isnan())
    return given


def is_exact(kind: str) -> bool:
    """False for K-quants: which of their multiplications and additions the compiler fuses depends
    on the number of rows."""
    return block_width(kind) != 256


def empty(*shape, dtype=torch.float32):
    if dtype == torch.int32:
        return torch.full(shape, -1, dtype=dtype, device=device())
    return torch.full(shape, NAN, device=device())


# ---- rows of matrices ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "num_rows"), KINDS_AND_ROWS)
def test_dot(kernels, kind, num_rows):
    """The output is some columns of longer rows, as for queries and keys."""
    matrix = make_matrix(kind, 5, block_width(kind), lies_apart=num_rows == 2)
    whole = torch.full((num_rows, 9), 7.0, device=device())
    bias = vector(5, seed=2) if num_rows == 2 else None
    found = assert_rows_as_alone(
        kernels,
        "dot",
        is_exact=is_exact(kind),
        matrix=matrix,
        bias_N=bias,
        x_D=vectors(num_rows, matrix.width),
        out_N=whole[:, 2:7],
        has_relu=num_rows == 2,
    )
    want = torch.empty(num_rows, 5, device=device())
    REFERENCE.dot(matrix, bias, found["x_D"], want, has_relu=num_rows == 2)
    assert_close(found["out_N"], want, 1e-4 * want.abs().max())
    assert (whole[:, :2] == 7).all() and (whole[:, 7:] == 7).all()


@pytest.mark.parametrize("num_rows", ROWS[1:])
@pytest.mark.parametrize("kind", ["f16", "q4_0_planar"])
def test_dot_of_every_number_of_rows(kernels, kind, num_rows):
    matrix = make_matrix(kind, 1, block_width(kind))
    assert_rows_as_alone(
        kernels, "dot", matrix=matrix, x_D=vectors(num_rows, matrix.width), out_N=empty(num_rows, 1)
    )


@pytest.mark.parametrize("is_added", [False, True])
def test_embed(kernels, is_added):
    matrix = make_matrix("q8_0_planar", 9, 64)
    index = torch.tensor([3, 0, 8, 3], device=device())
    out = vectors(4, 64, 2)
    assert_rows_as_alone(
        kernels, "embed", matrix=matrix, index_1=index, out_D=out, is_added=is_added
    )
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize(("kind", "num_rows"), SOME_KINDS)
def test_predict(kernels, kind, num_rows):
    matrix = make_matrix(kind, 37, block_width(kind))
    found = assert_rows_as_alone(
        kernels,
        "predict",
        up=matrix,
        bias_F=vector(37, 2),
        inner_R=vectors(num_rows, matrix.width),
        threshold=1.5,
        named_B=empty(num_rows, 2, dtype=torch.int32),
    )
    assert len({tuple(row.tolist()) for row in found["named_B"]}) > 1


# ---- neurons -------------------------------------------------------------------------------


def names(num_rows, num_neurons, seed=4, share=0.3):
    is_named = torch.rand(num_rows, num_neurons, generator=torch.Generator().manual_seed(seed))
    return pack_bits((is_named < share).to(device()))


@pytest.mark.parametrize(("kind", "num_rows"), SOME_KINDS)
def test_gate_up(kernels, kind, num_rows):
    """Each row names other neurons: one that a row reads is 0 for another row."""
    width = block_width(kind)
    gate, up = (make_matrix(kind, 9, width, seed=seed) for seed in (0, 5))
    found = assert_rows_as_alone(
        kernels,
        "gate_up",
        is_exact=is_exact(kind),
        gate=gate,
        up=up,
        named_B=names(num_rows, 9),
        x_D=vectors(num_rows, width),
        rule=Gate(activation="fatrelu", threshold=0.2),
        hidden_N=empty(num_rows, 9),
    )
    is_open = found["hidden_N"] != 0
    assert (is_open.any(dim=0) & ~is_open.all(dim=0)).any()


@pytest.mark.parametrize("activation, is_dense", [("drelu", False), ("silu", True)])
def test_gate_up_with_ids_biases_and_types(kernels, activation, is_dense):
    gate, up = make_matrix("f16", 13, 64), make_matrix("q8_0_planar", 13, 64, seed=5)
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:13].int().to(device())
    assert_rows_as_alone(
        kernels,
        "gate_up",
        gate=gate,
        gate_bias_N=vector(13, 6),
        up=up,
        up_bias_N=vector(13, 7),
        id_N=ids,
        named_B=None if is_dense else names(4, 40, share=0.7),
        x_D=vectors(4, 64),
        rule=Gate(activation=activation, threshold=0.1, computes_all=is_dense),
        hidden_N=empty(4, 13),
    )


@pytest.mark.parametrize("skips_zeros", [False, True])
@pytest.mark.parametrize(("kind", "num_rows"), SOME_KINDS)
def test_down(kernels, kind, num_rows, skips_zeros):
    """Each row has its zeros in other places."""
    matrix = make_matrix(kind, 70, block_width(kind), lies_apart=True)
    hidden = vectors(num_rows, 70, 3)
    hidden[vectors(num_rows, 70, 4).abs() < 1.0] = 0
    found = assert_rows_as_alone(
        kernels,
        "down",
        is_exact=is_exact(kind),
        down=matrix,
        hidden_N=hidden,
        parts_SD=empty(2, num_rows, matrix.width),
        skips_zeros=skips_zeros,
    )
    want = torch.empty_like(found["parts_SD"])
    REFERENCE.down(matrix, hidden, want, skips_zeros=skips_zeros)
    assert_close(found["parts_SD"], want, 1e-4 * want.abs().max())


def test_a_row_does_not_see_another_ones_nan(kernels):
    """There is NaN in the weights of a neuron that only one row reads, then in one row's vector."""
    matrix, hidden = make_matrix("f32", 40, 32), vectors(2, 40)
    matrix.data[7] = NAN
    hidden[1, 7] = 0
    parts = empty(2, 2, 32)
    kernels.down(matrix, hidden, parts, skips_zeros=True)
    assert parts[:, 0].isnan().any() and not parts[:, 1].isnan().any()
    x, out = vectors(2, 32), empty(2, 8)
    x[0] = NAN
    kernels.dot(make_matrix("f32", 8, 32), None, x, out)
    assert out[0].isnan().all() and not out[1].isnan().any()


# ---- norms and attention -------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [2, 32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_add_norm(kernels, has_bias, num_rows):
    width = 96
    given = {
        "x_D": vectors(num_rows, width),
        "weight_D": vector(width, 3),
        "epsilon": 1e-5,
        "parts_PD": vector(3 * num_rows * width, 2).view(3, num_rows, width),
        "bias_D": vector(width, 4) if has_bias else None,
    }
    out, x_out = empty(num_rows, width), empty(num_rows, width)
    assert_rows_as_alone(kernels, "add_norm", **given, out_D=out, x_out_D=x_out)
    in_place = given["x_D"]
    kernels.add_norm(in_place, given["parts_PD"], None, None, 0.0, None, in_place)
    assert torch.equal(in_place, x_out)


POSITIONS = (5, 64, 63, 130, 0, 127, 128, 199)
SEQUENCES = (0, 2, 1, 1, 3, 0, 2, 3)
WINDOWS = (None, 2, 129)


def paged(dtype, num_kv=2, width=32, seed=2):
    """(keys, values, table): f32 or f16 [B, C, K, W] each and int32 [S, N], for four sequences of
    256 positions."""
    num_blocks, by_heads = 16, (16, num_kv, 64, width)
    found = [
        vector(num_blocks * 64 * num_kv * width, seed + n).view(by_heads).transpose(1, 2).to(dtype)
        for n in range(2)
    ]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    return *found, order.int().view(4, 4).to(device())


def attending(num_rows, dtype=torch.float16, heads=4):
    key, value, table = paged(dtype)
    return {
        "qkv": vectors(num_rows, (heads + 4) * 32),
        "key_CKW": key,
        "value_CKW": value,
        "position_1": torch.tensor(POSITIONS[:num_rows], device=device()),
        "spec": heads_of(heads),
        "sequence_1": torch.tensor(SEQUENCES[:num_rows], device=device()).int(),
        "table_SN": table,
    }


def whole(given: dict, row: int) -> dict:
    """The same arguments for one row, with its sequence's keys and values in a contiguous cache."""
    own = {key: value for key, value in given.items() if key not in ("sequence_1", "table_SN")}
    blocks = given["table_SN"][int(given["sequence_1"][row])].long()
    for name in ("key_CKW", "value_CKW"):
        own[name] = given[name][blocks].flatten(0, 1)[:200].clone()
    own["qkv"] = given["qkv"][row].clone()
    own["position_1"] = given["position_1"][row : row + 1].clone()
    return own


@pytest.mark.parametrize(
    "num_rows, dtype", [(1, torch.float32), (4, torch.float32), (8, torch.float16)]
)
@pytest.mark.parametrize("window", WINDOWS)
def test_attend_to_blocks(kernels, num_rows, dtype, window):
    """Each row's output equals the one for its sequence alone, in a contiguous cache."""
    given, limits = attending(num_rows, dtype), {"spec": heads_of(window=window)}
    size = ranges.attend_scratch(256, 4, 32)
    out = empty(num_rows, 4 * 32)
    shape = (num_rows, -1) if num_rows > 1 else (-1,)
    given["qkv"] = given["qkv"].view(shape)
    kernels.attend(**given | limits, scratch=empty(num_rows * size), out_HW=out.view(shape))
    given["qkv"] = given["qkv"].view(num_rows, -1)
    for row in range(num_rows):
        own, want = whole(given, row), empty(4, 32)
        kernels.attend(**own | limits, scratch=empty(size), out_HW=want)
        assert torch.equal(out[row], want.flatten())
        right = empty(4, 32)
        REFERENCE.attend(**own | limits, scratch=empty(size), out_HW=right)
        assert_close(want, right, 1e-4)


@pytest.mark.parametrize("window", WINDOWS)
def test_attend_of_rows_of_one_sequence(kernels, window):
    """The rows are those of a draft to check: at consecutive positions, in a contiguous cache."""
    cache = vector(200 * 2 * 2 * 32, 2).view(200, 2, 2, 32).half()
    size = ranges.attend_scratch(200, 4, 32)
    assert_rows_as_alone(
        kernels,
        "attend",
        qkv=vectors(4, 8 * 32),
        key_CKW=cache[:, 0],
        value_CKW=cache[:, 1],
        position_1=torch.arange(62, 66, device=device()),
        spec=heads_of(window=window),
        scratch=empty(4 * size),
        out_HW=empty(4, 4 * 32),
    )


@pytest.mark.parametrize("num_rows, dtype", [(1, torch.float32), (8, torch.float16)])
def test_append_to_blocks(kernels, num_rows, dtype):
    found = []
    for which in (kernels, REFERENCE):
        given = attending(num_rows, dtype)
        before = given["key_CKW"].clone(), given["value_CKW"].clone()
        frequency = (10000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)).to(device())
        one = attending(num_rows, dtype)
        if num_rows == 1:
            given["qkv"] = given["qkv"][0]
        options = {
            "frequency_W2": frequency,
            "query_weight_W": vector(32, 2),
            "key_weight_W": vector(32, 3),
        }
        which.rotate_append(**given, **options)
        found.append(given)
        for row in range(num_rows):
            own = whole(one, row)
            which.rotate_append(**own, **options)
            assert torch.equal(given["qkv"].view(num_rows, -1)[row], own["qkv"])
            at = POSITIONS[row]
            block = given["table_SN"][SEQUENCES[row], at // 64]
            for name, old in zip(("key_CKW", "value_CKW"), before, strict=True):
                assert torch.equal(given[name][block, at % 64], own[name][at])
                old[block, at % 64] = given[name][block, at % 64]
        for name, old in zip(("key_CKW", "value_CKW"), before, strict=True):
            assert torch.equal(given[name], old)  # nothing else has changed
    got, want = found
    assert_close(got["qkv"], want["qkv"], 1e-4)
    assert_close(got["key_CKW"], want["key_CKW"], 2e-3)


def test_a_repeated_row_appends_once_and_attends(kernels):
    """Rows that pad a step repeat the last one and store nothing. Here, unlike in a step, their
    values differ from the last row's, so that a store would show."""
    given = attending(4)
    for name, values in (("position_1", (7, 9, 9, 9)), ("sequence_1", (1, 1, 1, 1))):
        given[name].copy_(torch.tensor(values))
    before = given["value_CKW"].clone()
    plain = {"frequency_W2": None, "query_weight_W": None, "key_weight_W": None}
    kernels.rotate_append(**given, **plain)
    block = given["table_SN"][1, 0]
    for row, at in ((0, 7), (1, 9)):
        assert torch.equal(given["value_CKW"][block, at].flatten(), given["qkv"][row, -64:].half())
        before[block, at] = given["value_CKW"][block, at]
    assert torch.equal(given["value_CKW"], before)
    given["sequence_1"][2:] = 2  # the same position of another sequence is not a repetition
    kernels.rotate_append(**given, **plain)
    other = given["value_CKW"][given["table_SN"][2, 0], 9].flatten()
    assert torch.equal(other, given["qkv"][2, -64:].half())


# ---- other kernels, and the comparison itself ----------------------------------------------


@pytest.mark.parametrize("wrong", ["another row", "the sum of two rows"])
def test_the_comparison_rejects_rows_that_mix(wrong):
    def mixed(matrix, bias_N, x_D, out_N, *, has_relu=False):
        REFERENCE.dot(matrix, bias_N, x_D, out_N)
        if x_D.dim() == 2:
            out_N.copy_(out_N.flip(0) if wrong == "another row" else out_N + 1e-6 * out_N.flip(0))

    class Mixed:
        dot = staticmethod(mixed)

    given = {"matrix": make_matrix("f32", 5, 32), "bias_N": None, "x_D": vectors(2, 32)}
    with pytest.raises(AssertionError):
        assert_rows_as_alone(Mixed, "dot", **given, out_N=empty(2, 5))


def test_rows_are_powers_of_two(kernels):
    with pytest.raises(AssertionError, match="power of 2"):
        kernels.dot(make_matrix("f32", 5, 32), None, vectors(3, 32), empty(3, 5))

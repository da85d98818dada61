"""The PTX executor: its results against exact arithmetic, and for each rule of the machine a few
lines of PTX that break it."""

import itertools
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from ptx import (
    BadBarrier,
    BadShuffle,
    DataRace,
    Fault,
    Memory,
    Misaligned,
    OutOfBounds,
    Program,
    Uninitialised,
    UnknownInstruction,
    arithmetic,
    machine,
)

THREADS = 64


def run(body: str, *, source=None, shared=256, blocks=1):
    """Runs lines of PTX with the pointers `out` in %rd1 and `source` in %rd2, the thread's number
    in its block in %r1, four times that in %r2, and four times its number in the grid in %rd3;
    returns `out`, one number per thread, and the record."""
    out = torch.zeros(blocks * THREADS, dtype=torch.int32)
    source = torch.arange(blocks * THREADS, dtype=torch.int32) if source is None else source
    text = f""".version 8.7
    .target sm_80
    .extern .shared .align 16 .b8 smem[];
    .visible .entry k(.param .u64 .ptr .global .align 1 k_0, .param .u64 k_1, .param .u32 k_2,
      .param .f32 k_3) .reqntid {THREADS} {{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .b64 %rd<20>;
    ld.param.b64 %rd1, [k_0]; ld.param.b64 %rd2, [k_1]; mov.u32 %r1, %tid.x;
    mov.u32 %r3, %ctaid.x; mad.lo.s32 %r4, %r3, {THREADS}, %r1;
    mul.wide.u32 %rd3, %r4, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    shl.b32 %r2, %r1, 2; mov.b32 %r5, smem; add.s32 %r6, %r5, %r2;
    {body}
    ret; }}"""
    memory = Memory()
    memory.add_tensor(out, name="out")
    memory.add_tensor(source, name="source", is_writable=False)
    args = [out.data_ptr(), source.data_ptr()]
    record = Program(text).launch("k", (blocks,), (THREADS,), args, memory, shared)
    return out, record


# ---- numbers -------------------------------------------------------------------------------


def nearest(exact: Fraction, dtype) -> np.floating:
    """The value of a type that is nearest to a fraction; ties go to even."""
    guess = dtype(float(exact))
    around = [np.nextafter(guess, dtype(-np.inf)), guess, np.nextafter(guess, dtype(np.inf))]
    off = [abs(Fraction(float(x)) - exact) for x in around]
    ties = [x for x, d in zip(around, off, strict=True) if d == min(off)]
    bits = "u4" if dtype is np.float32 else "u8"
    return min(ties, key=lambda x: int(x.view(bits)) & 1)


@pytest.mark.parametrize(
    ("dtype", "fma"), [(np.float32, arithmetic.fma32), (np.float64, arithmetic.fma64)]
)
def test_fma_rounds_once(dtype, fma):
    """Random numbers, sums that cancel, and sums at or close to halfway between two numbers."""
    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal(600).astype(dtype) for _ in range(3))
    c[:200] = -(a * b)[:200]
    digits = 24 if dtype is np.float32 else 53
    a[200:400] = 1 + random.integers(0, 99, 200) * dtype(2.0 ** (1 - digits))
    b[200:400] = 1
    c[200:400] = dtype(2.0**-digits) * random.choice([-1, 1, 1 + 2.0**-20, 1 - 2.0**-20], 200)
    got = fma(a, b, c)
    for x, y, z, found in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert found == nearest(exact, dtype), (x, y, z)
    assert ((a * b + c) != got).any()  # two roundings would show


def test_bf16_rounds_as_in_torch():
    bits = np.random.default_rng(1).integers(0, 1 << 32, 4000, dtype=np.uint32)
    bits[:2000] = bits[:2000] & 0xFFFF0000 | 0x8000  # ties
    x = torch.from_numpy(bits.view(np.float32).copy())
    got = arithmetic.of_bf16(arithmetic.bf16_bits(x.numpy()))
    assert np.array_equal(got, x.bfloat16().float().numpy(), equal_nan=True)


@pytest.mark.parametrize(
    ("opcode", "operands", "want"),
    [
        ("prmt.b32", "0x33221100, 0x77665544, 0x9CD8", 0x00000000),
        ("prmt.b32", "0xFF8000AA, 0x77665544, 0x8B31", 0xFFFFFF00),
        ("bfe.u32", "0xABCD1234, 8, 12", 0xD12),
        ("bfe.s32", "0x0000F000, 12, 4", 0xFFFFFFFF),
        ("bfe.s32", "0x80000000, 28, 9", 0xFFFFFFF8),
        ("shl.b32", "1, 32", 0),
        ("shr.s32", "0x80000000, 40", 0xFFFFFFFF),
        ("shf.l.wrap.b32", "0x80000001, 0xF0, 36", 0xF08),
        ("mul.hi.s32", "0x80000000, 4", 0xFFFFFFFE),
        ("popc.b32", "0xF0F00001", 9),
        ("max.s32", "0xFFFFFFFF, 1", 1),
        ("max.u32", "0xFFFFFFFF, 1", 0xFFFFFFFF),
        ("lop3.b32", "0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA, 0xE8", 0xE8E8E8E8),
        ("add.s16x2", "0x7FFFFFFF, 0x00010001", 0x80000000),
        ("neg.f32", "0f3F800000", 0xBF800000),
        ("cvt.rni.s32.f32", "0f40200000", 2),
        ("cvt.rni.ftz.s32.f32", "0f7FC00000", 0),
        ("cvt.rni.s32.f32", "0fFF800000", 0x80000000),
        ("min.f32", "0f80000000, 0f00000000", 0x80000000),
        ("max.f32", "0f7FC00000, 0f40000000", 0x40000000),
        ("mul.rn.ftz.f32", "0f00400000, 0f40000000", 0),
        ("mul.rn.f32", "0f00400000, 0f40000000", 0x00800000),
        ("cvt.rn.f16x2.f32", "0f3F800000, 0f40000000", 0x3C004000),
        ("cvt.rn.bf16x2.f32", "0f3F800000, 0f40000000", 0x3F804000),
    ],
)
def test_instructions_on_words(opcode, operands, want):
    out, _ = run(f"{opcode} %r9, {operands}; st.global.b32 [%rd4], %r9;")
    assert (out.numpy().view(np.uint32) == want).all()


def test_the_upper_half_of_a_product_of_64_bits():
    numbers = [0, 1, -1, 7, 1 << 62, -(1 << 63), (1 << 63) - 1, 0x123456789ABCDEF, -0xFEDCBA987654]
    for kind, bits in (("s64", lambda n: n), ("u64", lambda n: n % (1 << 64))):
        for a, b in itertools.product(numbers, numbers):
            want = (bits(a) * bits(b) >> 64) % (1 << 64)
            out, _ = run(
                f"mul.hi.{kind} %rd9, {a}, {b}; cvt.u32.u64 %r9, %rd9; shr.u64 %rd9, %rd9, 32;"
                "cvt.u32.u64 %r10, %rd9; setp.lt.u32 %p1, %r1, 32; selp.b32 %r9, %r9, %r10, %p1;"
                "st.global.b32 [%rd4], %r9;"
            )
            found = out.numpy().view(np.uint32)
            assert (found[:32] == want % (1 << 32)).all() and (found[32:] == want >> 32).all()


TABLE = """$table: .branchtargets $one, $two, $one; brx.idx %r7, $table;
    $two: mov.b32 %r9, 2; bra.uni $on; $one: mov.b32 %r9, 1; $on: st.global.b32 [%rd4], %r9;"""


def test_a_branch_by_a_table():
    """Taken by all threads alike, and by some of them."""
    out, _ = run("and.b32 %r7, %r1, 1;" + TABLE)
    assert out.tolist() == [1 + t % 2 for t in range(THREADS)]
    for index in range(3):
        out, _ = run(f"mov.b32 %r7, {index};" + TABLE)
        assert (out == 1 + (index == 1)).all()
    out, _ = run("setp.ge.u32 %p1, %r1, 3; mov.b32 %r7, %r1; @%p1 bra $end;" + TABLE + "$end: ret;")
    assert out.tolist() == [1, 2, 1] + [0] * 61


@pytest.mark.parametrize(
    ("order", "want"),
    [
        ("lt", [1, 0, 0]),
        ("ltu", [1, 0, 1]),
        ("ne", [1, 0, 0]),
        ("neu", [1, 0, 1]),
        ("num", [1, 1, 0]),
        ("nan", [0, 0, 1]),
    ],
)
def test_comparisons_with_nan(order, want):
    source = torch.tensor([1.0, 2.0, np.nan] + [2.0] * 61)
    body = f"""ld.global.b32 %r9, [%rd5]; setp.{order}.f32 %p1, %r9, 0f40000000;
    selp.b32 %r10, 1, 0, %p1; st.global.b32 [%rd4], %r10;"""
    out, _ = run(body, source=source)
    assert out[:3].tolist() == want


# ---- warps and control ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("bfly.b32 %r9, %r1, 5, 31, -1", lambda lane: lane ^ 5),
        ("up.b32 %r9, %r1, 3, 0, -1", lambda lane: lane if lane < 3 else lane - 3),
        ("down.b32 %r9, %r1, 3, 31, -1", lambda lane: lane if lane > 28 else lane + 3),
        ("idx.b32 %r9, %r1, 37, 31, -1", lambda lane: 5),
        ("up.b32 %r9, %r1, 1, 0x1800, -1", lambda lane: lane if lane % 8 == 0 else lane - 1),
    ],
)
def test_shuffles(text, want):
    out, _ = run(f"shfl.sync.{text}; st.global.b32 [%rd4], %r9;")
    assert out.tolist() == [32 * (t // 32) + want(t % 32) for t in range(THREADS)]


def test_lanes_diverge_at_a_branch_and_reconverge():
    """Loops of different lengths, then a shuffle of all lanes."""
    body = """and.b32 %r9, %r1, 7; mov.b32 %r10, 0;
    $again: setp.ge.s32 %p1, %r10, %r9; @%p1 bra $done;
    add.s32 %r10, %r10, 1; bra.uni $again;
    $done: shfl.sync.bfly.b32 %r11, %r10, 1, 31, -1; st.global.b32 [%rd4], %r11;"""
    out, record = run(body)
    assert out.tolist() == [(t ^ 1) % 8 for t in range(THREADS)]
    assert record.num_lane_instructions["shfl.sync.bfly.b32"] == THREADS


def test_a_grid_run_in_pieces_gives_the_same_results(monkeypatch):
    monkeypatch.setattr(machine, "LANES", 128)
    body = "ld.global.b32 %r9, [%rd5]; add.s32 %r9, %r9, %r3; st.global.b32 [%rd4], %r9;"
    out, record = run(body, blocks=5)
    assert out.tolist() == [t + t // THREADS for t in range(5 * THREADS)]
    assert record.writes == [(out.data_ptr(), 4 * 5 * THREADS)]
    assert record.reads[0][1] == 4 * 5 * THREADS


# ---- rules ---------------------------------------------------------------------------------

STORE = "st.global.b32 [%rd4], %r9;"
EXCHANGE = "st.shared.b32 [%r6], %r1; {} xor.b32 %r7, %r6, {}; ld.shared.b32 %r9, [%r7];" + STORE
BROKEN = {
    "past the end": (OutOfBounds, "ld.global.b32 %r9, [%rd5+4];" + STORE),
    "before the start": (OutOfBounds, "ld.global.b32 %r9, [%rd5-4];" + STORE),
    "a store past the end": (OutOfBounds, "mov.b32 %r9, 1; st.global.b32 [%rd4+64], %r9;"),
    "a store to read-only memory": (OutOfBounds, "st.global.b32 [%rd5], %r1;"),
    "past shared memory": (OutOfBounds, "st.shared.b32 [%r6+4], %r1;"),
    "an address of zero": (OutOfBounds, "mov.b64 %rd9, 0; ld.global.b32 %r9, [%rd9];" + STORE),
    "an odd address": (Misaligned, "ld.global.b32 %r9, [%rd2+2];" + STORE),
    "four words with the alignment of one": (
        Misaligned,
        "ld.global.v4.b32 {%r9, %r10, %r11, %r12}, [%rd2+4];" + STORE,
    ),
    "an odd address of shared memory": (Misaligned, "st.shared.b16 [%r5+1], 7;"),
    "a register without a value": (Uninitialised, STORE),
    "shared memory without a value": (Uninitialised, "ld.shared.b32 %r9, [%r6];" + STORE),
    "an address without a value": (Uninitialised, "ld.global.b32 %r9, [%rd9];" + STORE),
    "a branch without a value": (Uninitialised, "@%p1 bra $end; mov.b32 %r9, 0; $end: ret;"),
    "one half of a word": (Uninitialised, "mov.b16 %rs1, 1; mov.b32 %r9, {%rs1, %rs2};" + STORE),
    "no barrier between warps": (DataRace, EXCHANGE.format("", 128)),
    "no barrier in a warp": (DataRace, EXCHANGE.format("", 4)),
    "a warp's barrier between warps": (DataRace, EXCHANGE.format("bar.warp.sync -1;", 128)),
    "a store after a load": (
        DataRace,
        "st.shared.b32 [%r6], %r1; bar.sync 0; xor.b32 %r7, %r6, 128;"
        "ld.shared.b32 %r9, [%r7]; st.shared.b32 [%r6], %r9;" + STORE,
    ),
    "two threads store": (DataRace, "st.shared.b32 [%r5], %r1;"),
    "two blocks store": (
        DataRace,
        "add.s64 %rd9, %rd1, 0; setp.eq.s32 %p1, %r1, 0; @%p1 st.global.b32 [%rd9], %r3;",
    ),
    "two threads, one stores": (
        DataRace,
        "ld.global.b32 %r9, [%rd1]; setp.eq.s32 %p1, %r1, 5; @%p1 "
        + STORE
        + "@%p1 st.global.b32 [%rd1], %r9;",
    ),
    "a branch beyond its table": (OutOfBounds, "and.b32 %r7, %r1, 3;" + TABLE),
    "a branch by an undefined index": (Uninitialised, TABLE),
    "a part of a warp at a barrier": (
        BadBarrier,
        "setp.lt.s32 %p1, %r1, 7; @%p1 bra $skip; bar.sync 0; $skip: ret;",
    ),
    "a warp that never arrives": (
        BadBarrier,
        "setp.lt.s32 %p1, %r1, 32; @%p1 bra $end; bar.sync 0; $end: ret;",
    ),
    "a shuffle of half a warp": (
        BadShuffle,
        "setp.lt.s32 %p1, %r1, 7; @%p1 bra $skip;"
        "shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1; $skip: ret;",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_breaking_a_rule_raises_its_fault(name):
    kind, body = BROKEN[name]
    with pytest.raises(Fault) as caught:
        run(body, blocks=2)
    assert type(caught.value) is kind, caught.value
    assert str(caught.value).startswith("k: ") and "block" in str(caught.value)


def test_code_within_the_rules_passes():
    """An exchange with a barrier, equal values stored to one place, unused undefined values."""
    out, _ = run(EXCHANGE.format("bar.sync 0;", 128))
    assert out.tolist() == [t ^ 32 for t in range(THREADS)]
    out, _ = run(EXCHANGE.format("bar.warp.sync -1;", 4))
    assert out.tolist() == [t ^ 1 for t in range(THREADS)]
    run("mov.b32 %r9, 5; st.shared.b32 [%r5], %r9; bar.sync 0; ld.shared.b32 %r10, [%r5];")
    out, _ = run(
        "setp.lt.s32 %p1, %r1, 9; @%p1 mov.b32 %r9, 3; selp.b32 %r10, %r9, 4, %p1;"
        "st.global.b32 [%rd4], %r10;"
    )
    assert out.tolist() == [3] * 9 + [4] * 55
    out, _ = run(
        "bfi.b32 %r10, %r1, %r9, 8, 8; and.b32 %r10, %r10, 65280;st.global.b32 [%rd4], %r10;"
    )
    assert out.tolist() == [t << 8 for t in range(THREADS)]


def test_warps_may_reach_a_barrier_on_different_paths():
    body = (
        """setp.lt.u32 %p1, %r1, 32; @%p1 bra $first; bar.sync 0; bra.uni $on;
    $first: st.shared.b32 [%r6], %r1; bar.sync 0; $on: and.b32 %r7, %r2, 127; add.s32 %r7, %r7, %r5;
    ld.shared.b32 %r9, [%r7];"""
        + STORE
    )
    out, _ = run(body)
    assert out.tolist() == [*range(32)] * 2


def test_threads_may_store_values_to_one_place_that_differ_only_by_rounding():
    close = "cvt.rn.f32.s32 %r9, %r1; fma.rn.f32 %r9, %r9, 0f33800000, 0f40000000;"
    store = "st.shared.b32 [%r5], %r9; bar.sync 0; ld.shared.b32 %r9, [%r5];" + STORE
    run(close + store)
    with pytest.raises(DataRace):
        run("cvt.rn.f32.s32 %r9, %r1; " + store)


# ---- text and memory -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "frobnicate.b32 %r9, %r1;",
        "add.sat.s32 %r9, %r1, 1;",
        "ld.global.v8.b32 %r9, [%rd5];",
        "atom.global.add.u32 %r9, [%rd4], 1;",
        "cvt.rz.f32.f64 %r9, %rd1;",
        "bar.sync 1;",
        "shfl.bfly.b32 %r9, %r1, 1, 31;",
        "mov.u32 %r9, %clock;",
        "mov.b32 %r99, 1;",
        "add.f32 %rd9, %rd1, %rd2;",
    ],
)
def test_an_unknown_instruction_is_named(body):
    with pytest.raises(UnknownInstruction, match=re.escape(body.split(".")[0])):
        run(body)


def test_memory_tracks_elements_gaps_and_writes():
    rows = torch.zeros(4, 10)[:, :6]
    memory = Memory()
    memory.add_tensor(rows, name="rows", is_written=False)
    with pytest.raises(Uninitialised, match="24 of 24"):
        memory.check_written(rows)
    for offset in (24, 36):
        with pytest.raises(OutOfBounds, match="belongs to no element"):
            source = torch.zeros(4, 10)[:, :6]
            run(f"ld.global.b32 %r9, [%rd2+{offset}];" + STORE, source=source)

"""Compares a launch of a fast kernel with the same launch by torch, on the launch's own weights and
shapes and on random vectors. If the cache has several sequences, the rows of a step are spread over
them; if a step has more than two rows, the last one has the token, position and sequence of the one
before it.

Letters: see runtime.kernels.gpu.kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from kernel_launches import SLOTS, Launch
from torch import Tensor

from hotsplit.runtime.kernels.gpu.kernels import Kernels

# The largest |got - want| / |want| of a correct kernel. Sums of 16,384 terms in f32 have a relative
# error of about 1e-6; the rest is room for the device's exp and sin.
BOUND = 1e-4
ROUNDED_BOUND = 2e-3  # for results in 16 bits: bf16 keeps 8 significant bits; the last may differ
_ROUNDING = ("multiply", "multiply_down")  # kernels that round weights to f16
# Close to a threshold, a neuron may be silent in one kernel and not in the other.
FIRING_BOUND = 1e-3
# The share of a predictor's bits that may differ for the same reason, and the number that always
# may.
BITS_SHARE, LEAST_BITS = 1e-3, 2
_MOST_DRAWN = 1 << 22  # random numbers; longer tensors repeat them
_CACHES = ("key_CKW", "value_CKW", *SLOTS)
_NUM_SLOTS = 3  # one that the runs of a check read, and one for each of two runs


class Wrong(Exception):
    """A part of the runtime gives a wrong result; the message says how."""


def check_launch(launch: Launch, fast: Kernels, plain: Kernels, wait: Callable[[], None]) -> None:
    """Raises Wrong, or whatever the kernel raises, unless both write the same within the bounds.

    Overwrites the launch's vectors and restores the cache. `wait` waits for the device and raises
    what went wrong there."""
    launch = _with_few_blocks(launch)
    current = torch.cuda.device(launch.device) if launch.device.type == "cuda" else nullcontext()
    with torch.inference_mode(), current, _filled(launch):
        before = [values.clone() for values in _outputs(launch)]
        got = _results(launch, fast, before, wait)
        want = _results(launch, plain, before, wait)
    for name, mine, right in zip(launch.declared.writes, got, want, strict=False):
        why = difference(mine, right, _bound(launch, right))
        if why:
            raise Wrong(f"{name.partition('_')[0]} {why}")


def difference(got: Tensor, want: Tensor, bound: float) -> str:
    """Describes a difference larger than the bound; "" if there is none."""
    if want.dtype == torch.int32:
        count = int(_bits(got ^ want))
        most = max(LEAST_BITS, int(BITS_SHARE * 32 * want.numel()))
        return f"differs in {count:,} bits, at most {most:,} wanted" if count > most else ""
    got, want = got.double(), want.double()
    if not torch.equal(got.isnan(), want.isnan()):
        return f"has NaN in the wrong places ({int((got.isnan() ^ want.isnan()).sum()):,} values)"
    got, want = got.nan_to_num(), want.nan_to_num()
    error, size = float((got - want).norm()), float(want.norm())
    if error <= bound * size:
        return ""
    return f"is off by {error / size if size else float('inf'):.2g}, at most {bound:g} wanted"


def _bits(words: Tensor) -> Tensor:
    shifts = torch.arange(32, device=words.device)
    return (words.flatten()[:, None] >> shifts & 1).sum()


def _bound(launch: Launch, want: Tensor) -> float:
    if want.dtype in (torch.float16, torch.bfloat16) or launch.kernel in _ROUNDING:
        return ROUNDED_BOUND
    return FIRING_BOUND if launch.kernel in ("gate_up", "expert_gate_up") else BOUND


def _results(
    launch: Launch, kernels: Kernels, before: list[Tensor], wait: Callable[[], None]
) -> list[Tensor]:
    """Copies of what a launch writes."""
    for target, values in zip(_outputs(launch), before, strict=True):
        target.copy_(values)
    launch.run(kernels)
    wait()
    return [values.clone() for values in _outputs(launch)]


def _outputs(launch: Launch) -> list[Tensor]:
    """The memory that a launch writes."""
    given = launch.arguments
    found = [given[name] for name in launch.declared.writes if given[name] is not None]
    if launch.kernel == "choose_experts":  # numbers apart from weights, which are much smaller
        return [half for values in found for half in values.chunk(2, dim=-1)]
    if launch.kernel != "rotate_append":
        return found
    qkv, *caches = found[:3]
    queries = given["spec"].query_size + given["spec"].gate_size
    if given["table_SN"] is None:  # the positions that `_fill` chooses
        caches = [cache[-launch.num_rows :] for cache in caches]
    return [qkv[..., :queries], *caches, *found[3:]]


def _with_few_blocks(launch: Launch) -> Launch:
    """The launch on a cache cut to its first blocks, one per sequence with a row, or on states cut
    to a few slots; unchanged if the cache has no block table."""
    given = launch.arguments
    count = _NUM_SLOTS if given.get("table_SN") is None else _num_sequences(launch)
    names = SLOTS if given.get("table_SN") is None else _CACHES
    cut = {name: given[name][:count] for name in names if name in given}
    return replace(launch, arguments=given | cut)


def _num_sequences(launch: Launch) -> int:
    """Number of sequences over which the rows of a check are spread."""
    table_SN = launch.arguments.get("table_SN")
    return 1 if table_SN is None else min(launch.num_rows, len(table_SN))


@contextmanager
def _filled(launch: Launch) -> Iterator[None]:
    """Fills inputs with random numbers, or with fixed indices and positions, and outputs that are
    not also inputs with NaN or a bit pattern, so that unwritten values show. Afterwards zeroes both
    and restores the cache."""
    random, given = torch.Generator().manual_seed(len(launch.variant)), launch.arguments
    caches = [given[name] for name in _CACHES if name in given]
    kept = [values.to("cpu", copy=True) for values in caches]
    read = launch.declared.reads
    inputs = [name for name in read if given[name] is not None]
    try:
        for target in _outputs(launch):
            target.fill_(0x5555 if target.dtype == torch.int32 else torch.nan)
        if given.get("is_added"):
            _randomise(_outputs(launch)[0], random)
        for name in inputs:
            _fill(launch, name, random)
        yield
        for values in (*(given[name] for name in inputs), *_outputs(launch)):
            values.zero_()
    finally:
        for values, before in zip(caches, kept, strict=True):
            values.copy_(before)


def _fill(launch: Launch, name: str, random: torch.Generator) -> None:
    given = launch.arguments
    values: Tensor = given[name]
    row_T = torch.arange(launch.num_rows)
    if launch.num_rows > 2:
        row_T[-1] -= 1
    count = _num_sequences(launch)
    if name == "index_1":
        values.copy_((given["matrix"].num_rows // 2 + row_T) % given["matrix"].num_rows)
    elif name == "sequence_1":
        values.copy_(row_T % count)
    elif name == "table_SN":  # sequences with rows end in different blocks
        sequence_S, block_N = (torch.arange(size) for size in values.shape)
        values.copy_((sequence_S[:, None] + block_N) % count)
    elif name == "run_R3":  # the second half of the rows is a run of its own, if there is room
        half = launch.num_rows // 2 if len(values) > 1 else 0
        runs = (
            [[0, half, 0], [half, launch.num_rows - half, 0]] if half else [[0, launch.num_rows, 0]]
        )
        values[: len(runs)] = torch.tensor(runs, dtype=torch.int32)
    elif name == "writes_T":
        values.fill_(-1)
        values[-1] = 1
        if launch.num_rows > 1:
            values[launch.num_rows // 2 - 1] = 2
    elif name == "mixed_TX":  # keys of about unit size, decays and strengths below 1
        value_heads, key_width = given["state_SVNM"].shape[1:3]
        _randomise(values, random)
        values *= key_width**-0.5
        gates = torch.rand((*values.shape[:-1], 2 * value_heads), generator=random)
        values[..., -2 * value_heads :] = gates.to(values.device)
    elif name == "routed_2K":
        num_used = values.shape[-1] // 2
        drawn = torch.rand(values.shape, generator=random)
        drawn[..., :num_used] = _stored_experts(given, num_used)
        values.copy_(drawn)
    elif name == "position_1":  # the last ones, so that attention reads the whole cache
        values.copy_((_context_length(given) - 1 - row_T // count).clamp(min=0))
    elif name == "position_T":
        row_T = torch.arange(len(values)) - len(values)
        values.copy_((_context_length(given) + row_T).clamp(min=0))
    else:
        _randomise(values, random)
    if name == "hidden_N" and given["skips_zeros"]:
        values.view(-1)[::3] = 0


def _stored_experts(given: dict[str, Any], num_used: int) -> Tensor:
    """Distinct experts, of which as many as possible are stored, the last one among them."""
    place_E: Tensor | None = given["place_E"]
    if place_E is not None:
        return place_E.cpu().argsort(descending=True)[:num_used]
    is_by_output = given.get("is_by_output", False)
    matrix = given["down" if "down" in given else "gate"]
    count = matrix.num_rows // given["parts_PD" if is_by_output else "hidden_KF"].shape[-1]
    return count - 1 - torch.arange(num_used)


def _context_length(given: dict[str, Any]) -> int:
    key_CKW, table_SN = given["key_CKW"], given["table_SN"]
    return len(key_CKW) if table_SN is None else key_CKW.shape[1] * table_SN.shape[1]


def _randomise(values: Tensor, random: torch.Generator) -> None:
    """Fills with normal numbers, or int32 and bool with random bits; drawn on the CPU, so that they
    are the same on every device."""
    if values.dtype == torch.bool:
        values.copy_(torch.rand(values.shape, generator=random) < 0.5)
    elif values.dtype == torch.int32:
        limits = torch.iinfo(torch.int32)
        drawn = torch.randint(limits.min, limits.max, values.shape, generator=random)
        values.copy_(drawn.to(torch.int32))
    else:  # the rows of a long cache repeat
        rows = max(1, _MOST_DRAWN // max(1, values[:1].numel()))
        drawn = torch.randn((min(rows, len(values)), *values.shape[1:]), generator=random)
        for piece in values.split(rows):
            piece.copy_(drawn[: len(piece)])

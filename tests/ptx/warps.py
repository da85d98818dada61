"""Instructions that the lanes of a warp execute together: shuffles, reductions, warp barriers, and
loads and stores of matrices in shared memory."""

import numpy as np

from ptx.faults import UnknownInstruction
from ptx.moves import as_bits, as_bytes
from ptx.operands import address, source, spread, vector

WARP = 32


def shuffle(name, modifiers, operands, registers):
    if modifiers[:1] != ["sync"] or modifiers[2:] != ["b32"]:
        raise UnknownInstruction("shfl." + ".".join(modifiers))
    mode = modifiers[1]
    if mode not in ("bfly", "idx", "up", "down"):
        raise UnknownInstruction(f"shfl.sync.{mode}")
    target, *sources = operands
    if "|" in target:
        raise UnknownInstruction("shfl with two results")
    number = registers.find(target)
    pairs = [source(text, "b32", registers) for text in sources]

    def step(machine, mask):
        value, by, clamp, members = (getter(machine) for getter, _ in pairs)
        machine.check_members(members, mask)
        machine.check_defined([pairs[1][1], pairs[2][1], pairs[3][1]], mask, "a shuffle's lane")
        lane = machine.lane_in_warp
        other, is_inside = _other(mode, lane, by, clamp)
        other = np.where(is_inside, other, lane)
        index = machine.warp_start + other
        if mask is not None:
            machine.check_sources(mask, index)
        value = np.broadcast_to(value, machine.num_lanes)[index]
        undefined = machine.undefined_of(pairs[0][1])
        undefined = None if undefined is None else undefined[index]
        machine.write(number, value, undefined, mask)

    return step


def _other(mode, lane, by, clamp):
    """(the lane that each lane of the warp names as its source, whether the segment contains
    it)."""
    by, bound = np.asarray(by & np.uint32(31), np.int64), np.asarray(clamp, np.int64)
    segment, bound = (bound >> 8) & 31, bound & 31
    last = (lane & segment) | (bound & ~segment)
    first = lane & segment
    if mode == "up":
        return lane - by, lane - by >= last
    if mode == "down":
        return lane + by, lane + by <= last
    if mode == "bfly":
        return lane ^ by, (lane ^ by) <= last
    other = first | (by & ~segment)
    return other, other <= last


def reduction(name, modifiers, operands, registers):
    """redux of integers over all lanes of a warp."""
    _, operation, kind = modifiers
    compute = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }.get(operation)
    if modifiers[0] != "sync" or compute is None or kind not in ("u32", "s32", "b32"):
        raise UnknownInstruction("redux." + ".".join(modifiers))

    def joined(rows):
        return compute.reduce(rows, axis=1, dtype=rows.dtype)

    return _over_warps(operands, kind, joined, registers)


def _over_warps(operands, kind, joined, registers):
    """One result for each warp, whose lanes must all take part."""
    target, value, members = operands
    number = registers.find(target)
    (get, read), (get_members, _) = (
        source(value, kind, registers),
        source(members, "b32", registers),
    )

    def step(machine, mask):
        machine.check_members(get_members(machine), mask, needs_all=True)
        rows = np.broadcast_to(get(machine), machine.num_lanes).reshape(-1, WARP)
        found = joined(rows).repeat(WARP)
        undefined = machine.undefined_of(read)
        if undefined is not None:
            undefined = spread(undefined.reshape(-1, WARP).max(axis=1).repeat(WARP))
        held = registers.dtype(number)
        machine.write(number, found if held == found.dtype else found.view(held), undefined, mask)

    return step


# ---- matrices ------------------------------------------------------------------------------


def _matrices(modifiers):
    """(N, whether matrices are transposed) of .sync.aligned.m8n8.xN[.trans].shared.b16."""
    rest = [m for m in modifiers if m != "trans"]
    if rest[:3] != ["sync", "aligned", "m8n8"] or rest[4:] != ["shared", "b16"]:
        raise UnknownInstruction("modifier ." + ".".join(modifiers))
    if rest[3] not in ("x1", "x2", "x4"):
        raise UnknownInstruction(f"modifier .{rest[3]}")
    return int(rest[3][1]), "trans" in modifiers


def _taking_part(machine, mask, count):
    """(warps, the lanes that give addresses of `count` matrices, all lanes of the warps)."""
    machine.check_members(np.uint32(0xFFFFFFFF), mask, needs_all=True)
    warps = machine.warps_of(mask)
    lanes, everyone = (
        (WARP * warps[:, None] + np.arange(each)).reshape(-1) for each in (8 * count, WARP)
    )
    return warps, lanes, everyone


def load_matrix(name, modifiers, operands, registers):
    """Lanes 8 m to 8 m + 7 give the addresses of the rows of matrix m. From each matrix, which
    .trans transposes first, lane l gets values 2 (l mod 4) and 2 (l mod 4) + 1 of row
    floor(l / 4)."""
    count, is_turned = _matrices(modifiers)
    numbers = [registers.find(text) for text in vector(operands[0])]
    assert len(numbers) == count, operands
    getter, read = address(operands[1], registers)

    def step(machine, mask):
        warps, lanes, everyone = _taking_part(machine, mask, count)
        _, places = machine.places(getter(machine), read, lanes)
        data, unwritten = machine.load("shared", places, lanes, 16)
        values = data.view(np.uint16).reshape(len(warps), count, 8, 8)
        missing = None if unwritten is None else unwritten.reshape(*values.shape, 2)
        if is_turned:
            values = values.swapaxes(2, 3)
            missing = None if missing is None else missing.swapaxes(2, 3)
        for at, number in enumerate(numbers):
            part = np.ascontiguousarray(values[:, at]).reshape(-1, 2).view(np.uint32)[:, 0]
            gone = None if missing is None else as_bits(missing[:, at].reshape(-1, 4))
            machine.write_lanes(number, part, gone, everyone)

    return step


def store_matrix(name, modifiers, operands, registers):
    count, is_turned = _matrices(modifiers)
    getter, read = address(operands[0], registers)
    pairs = [source(text, "b32", registers) for text in vector(operands[1])]
    assert len(pairs) == count, operands

    def step(machine, mask):
        warps, lanes, everyone = _taking_part(machine, mask, count)
        _, places = machine.places(getter(machine), read, lanes)
        shape = (len(warps), count, 8, 8)
        values, missing = np.empty(shape, np.uint16), np.zeros((*shape, 2), bool)
        for at, (get, numbers) in enumerate(pairs):
            part = np.ascontiguousarray(np.broadcast_to(get(machine), machine.num_lanes)[everyone])
            values[:, at] = part.view(np.uint16).reshape(-1, 8, 8)
            if (found := machine.undefined_of(numbers)) is not None:
                missing[:, at] = as_bytes(found[everyone], 4).reshape(-1, 8, 8, 2)
        if is_turned:
            values, missing = values.swapaxes(2, 3), missing.swapaxes(2, 3)
        data = np.ascontiguousarray(values).reshape(-1, 8).view(np.uint8)
        unwritten = missing.reshape(-1, 16) if missing.any() else None
        machine.store("shared", places, lanes, data, unwritten)

    return step


def warp_barrier(name, modifiers, operands, registers):
    if modifiers != ["warp", "sync"]:
        raise UnknownInstruction("bar." + ".".join(modifiers))
    get_members, _ = source(operands[0], "b32", registers)

    def step(machine, mask):
        machine.check_members(get_members(machine), mask)
        machine.pass_warp_barrier(mask)

    return step


WARPS = {"shfl": shuffle, "redux": reduction, "ldmatrix": load_matrix, "stmatrix": store_matrix}

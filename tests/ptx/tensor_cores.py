"""Copies from global to shared memory that arrive late (cp.async), and products of matrices by the
lanes of a warp (mma)."""

import numpy as np

from ptx.faults import UnknownInstruction
from ptx.operands import ALL_BYTES, address, source, vector

WARP = 32


class Copies:
    """Copies that have not arrived. Each lane has groups of its own, the last of which is open."""

    def __init__(self, num_lanes: int) -> None:
        self._waiting: list[tuple] = []
        self._open = np.zeros(num_lanes, np.int64)  # the number of each lane's open group

    def add(self, places, lanes, value) -> None:
        self._waiting.append((places, lanes, value, self._open[lanes]))

    def commit(self, mask) -> None:
        self._open[slice(None) if mask is None else mask] += 1

    def wait(self, machine, most: int, mask) -> None:
        """Makes all but the latest `most` groups of these lanes arrive."""
        waits = np.ones(len(self._open), bool) if mask is None else mask
        waiting, self._waiting = self._waiting, []
        for places, lanes, value, group in waiting:
            arrives = waits[lanes] & (group < self._open[lanes] - most)
            if arrives.any():
                machine.store("shared", places[arrives], lanes[arrives], value[arrives], None)
            rest = ~arrives
            if rest.any():
                self._waiting.append((places[rest], lanes[rest], value[rest], group[rest]))


def copy(name, modifiers, operands, registers):
    """A copy arrives when its group is waited for; until then, shared memory has its old state."""
    if modifiers[0] != "async":
        raise UnknownInstruction("cp." + ".".join(modifiers))
    if modifiers[1] == "commit_group":
        return lambda machine, mask: machine.copies.commit(mask)
    if modifiers[1] == "wait_group":
        most = int(operands[0], 0)
        return lambda machine, mask: machine.copies.wait(machine, most, mask)
    if modifiers[1] not in ("ca", "cg") or modifiers[2:] != ["shared", "global"]:
        raise UnknownInstruction("cp." + ".".join(modifiers))
    (to, to_reads), (of, of_reads) = (address(text, registers) for text in operands[:2])
    size = int(operands[2], 0)
    (given, given_reads) = source(operands[3] if len(operands) > 3 else str(size), "b32", registers)

    def step(machine, mask):
        machine.check_defined([given_reads], mask, "the size of a copy")
        counts = np.broadcast_to(given(machine), machine.num_lanes)
        active = np.ones(machine.num_lanes, bool) if mask is None else mask
        if np.any(active & (counts != 0) & (counts != size)):
            raise UnknownInstruction("cp.async of a part of its bytes")
        lanes, places = machine.places(to(machine), to_reads, np.flatnonzero(active))
        data = np.zeros((len(lanes), size), np.uint8)
        is_read = counts[lanes] != 0
        if is_read.any():
            readers, sources = machine.places(of(machine), of_reads, lanes[is_read])
            data[is_read], _ = machine.load("global", sources, readers, size)
        machine.copies.add(places, lanes, data)

    return step


def multiply(name, modifiers, operands, registers):
    """d = a b + c for matrices of 16 x 16, 16 x 8 and 16 x 8 values (PTX ISA, "Matrix Fragments for
    mma.m16n8k16"). PTX leaves the order of the sum open; here it is exact, then rounded toward
    zero, as devices do with each of its terms (Fasi et al., "Numerical behavior of NVIDIA tensor
    cores", 2021)."""
    if modifiers != ["sync", "aligned", "m16n8k16", "row", "col", "f32", "f16", "f16", "f32"]:
        raise UnknownInstruction("mma." + ".".join(modifiers))
    targets = [registers.find(text) for text in vector(operands[0])]
    a, b, c = (vector(text) for text in operands[1:])
    assert (len(targets), len(a), len(b), len(c)) == (4, 4, 2, 4), operands
    pairs = [source(text, "b32", registers) for text in (*a, *b)]
    pairs += [source(text, "f32", registers) for text in c]

    def step(machine, mask):
        machine.check_members(np.uint32(0xFFFFFFFF), mask, needs_all=True)
        words = [np.broadcast_to(get(machine), machine.num_lanes) for get, _ in pairs]
        halves = [_halves(word) for word in words[:6]]  # [warps, 8, 4, 2]
        a_MK = np.block(
            [[_rows(halves[0]), _rows(halves[2])], [_rows(halves[1]), _rows(halves[3])]]
        )
        b_KN = np.concatenate([_rows(halves[4]), _rows(halves[5])], axis=2).swapaxes(1, 2)
        upper, lower = (np.stack(words[at : at + 2], axis=1).reshape(-1, 8, 8) for at in (6, 8))
        d_MN = _toward_zero(a_MK @ b_KN + np.concatenate([upper, lower], axis=1))
        found = d_MN.reshape(-1, 2, WARP, 2)
        gone = _undefined(machine, [read for _, read in pairs])
        for at, number in enumerate(targets):
            value = np.ascontiguousarray(found[:, at // 2, :, at % 2]).reshape(-1)
            machine.write(number, value.view(registers.dtype(number)), gone, mask)

    return step


def _halves(word: np.ndarray) -> np.ndarray:
    """f64 [warps, 8, 4, 2] from words [lanes] of two f16."""
    return np.ascontiguousarray(word).view(np.float16).astype(np.float64).reshape(-1, 8, 4, 2)


def _rows(halves: np.ndarray) -> np.ndarray:
    """[warps, 8, 8]: row l / 4 has values 2 (l mod 4) and 2 (l mod 4) + 1 of lane l."""
    return halves.reshape(-1, 8, 8)


def _toward_zero(x: np.ndarray) -> np.ndarray:
    """f64 rounded to f32 toward zero."""
    near = x.astype(np.float32)
    is_beyond = np.abs(near.astype(np.float64)) > np.abs(x)
    return np.where(is_beyond & np.isfinite(x), np.nextafter(near, np.float32(0)), near)


def _undefined(machine, reads) -> np.ndarray | None:
    """All values of a warp in which any operand is undefined."""
    found = [u for u in map(machine.undefined_of, reads) if u is not None]
    if not found:
        return None
    any_lane = np.logical_or.reduce([u != 0 for u in found]).reshape(-1, WARP).any(axis=1)
    return np.where(any_lane.repeat(WARP), ALL_BYTES, np.uint8(0))


TENSOR_CORES = {"cp": copy, "mma": multiply}

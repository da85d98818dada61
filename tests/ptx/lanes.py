"""Executes some blocks of a launch together, with each thread a lane of numpy arrays: registers,
shared memory, branches and barriers."""

import numpy as np

from ptx import memory as global_memory
from ptx.blocks import Block
from ptx.faults import (
    BadBarrier,
    BadShuffle,
    DataRace,
    Fault,
    OutOfBounds,
    TooEarly,
    Uninitialised,
    UnknownInstruction,
)
from ptx.memory import Outside, check_alignment
from ptx.operands import ALL_BYTES, Reads, either
from ptx.races import Access, find_race
from ptx.tensor_cores import Copies

WARP = 32
SHARED_BASE = 1 << 10  # the start of shared memory, so that small wrong addresses lie outside


def _merged(mask, undefined, old) -> np.ndarray | None:
    """The undefined bytes after some lanes get new values."""
    if old is None and undefined is None:
        return None
    nothing = np.uint8(0)
    merged = np.where(
        mask, nothing if undefined is None else undefined, nothing if old is None else old
    )
    return merged if merged.any() else None


class Machine:
    """Some blocks of a launch; each of their threads is a lane of the arrays."""

    def __init__(self, launch, numbers: np.ndarray):
        self.launch, self.numbers = launch, numbers
        threads = launch.num_threads
        self.num_blocks, self.num_lanes = len(numbers), len(numbers) * threads
        self.lane = np.arange(self.num_lanes)
        self.lane_in_warp = self.lane % WARP
        self.warp_start = self.lane - self.lane_in_warp
        self.block_of = self.lane // threads
        self.thread_number = numbers[self.block_of] * threads + self.lane % threads
        self.block_epoch = np.zeros(self.num_blocks, np.int32)
        self.warp_epoch = np.zeros(self.num_lanes // WARP, np.int32)
        self._start_registers()
        self._start_shared()
        self._special: dict[str, np.ndarray] = {}
        self.current = None

    def _start_registers(self) -> None:
        types = self.launch.code.registers
        nothing = {dtype: np.zeros(self.num_lanes, dtype) for dtype in set(types)}
        never = np.full(self.num_lanes, ALL_BYTES)
        self.value = [nothing[dtype] for dtype in types]
        self.undefined: list[np.ndarray | None] = [never] * len(types)
        self.carry, self.carry_undefined = np.zeros(self.num_lanes, np.uint64), never

    def _start_shared(self) -> None:
        launch = self.launch
        self.pitch = {  # bytes from block to block, or from thread to thread
            "shared": -(-launch.shared_bytes // 16) * 16,
            "local": -(-launch.local_bytes // 16) * 16,
        }
        count = {"shared": self.num_blocks, "local": self.num_lanes}
        size = {space: pitch * count[space] for space, pitch in self.pitch.items()}
        self.bytes = {space: np.zeros(size[space], np.uint8) for space in size}
        self.written = {space: np.zeros(size[space], bool) for space in size}
        self.limit = {"shared": launch.shared_bytes, "local": launch.local_bytes}
        self.owner_of = {"shared": self.block_of, "local": self.lane}
        self.unit = launch.code.shared_unit
        units = size["shared"] // self.unit
        self.last_writer = np.full(units, -1, np.int32)
        self.is_read = np.zeros(units, bool)
        self.may_race = False
        self.shared_log: list[Access] = []
        self.copies = Copies(self.num_lanes)
        self.has_waited = np.full(self.num_lanes, launch.early is None)

    # ---- registers ----------------------------------------------------------------------------

    def write(self, number: int, value, undefined, mask) -> None:
        """Gives the active lanes of a register new values."""
        if np.ndim(value) == 0:
            value = np.full(self.num_lanes, value)
        if mask is not None:
            value = np.where(mask, value, self.value[number])
            undefined = _merged(mask, undefined, self.undefined[number])
        elif undefined is not None and not undefined.any():
            undefined = None
        self.value[number], self.undefined[number] = value, undefined

    def write_lanes(self, number: int, value, undefined, lanes) -> None:
        """The same for lanes given by number; None: all lanes."""
        if lanes is None:
            self.write(number, value, undefined, None)
            return
        whole = self.value[number].copy()
        whole[lanes] = value
        old = self.undefined[number]
        if old is not None or undefined is not None:
            old = np.zeros(self.num_lanes, np.uint8) if old is None else old.copy()
            old[lanes] = 0 if undefined is None else undefined
            old = old if old.any() else None
        self.value[number], self.undefined[number] = whole, old

    def undefined_of(self, reads: Reads) -> np.ndarray | None:
        found = None
        for register, read in reads:
            undefined = self.undefined[register]
            if undefined is not None:
                found = either(found, undefined if read == ALL_BYTES else undefined & read)
        return found

    def set_carry(self, carry, undefined, mask) -> None:
        if mask is not None:
            carry = np.where(mask, carry, self.carry)
            undefined = _merged(mask, undefined, self.carry_undefined)
        self.carry, self.carry_undefined = carry, undefined

    def special(self, name: str) -> np.ndarray:
        if name not in self._special:
            self._special[name] = self._made(name)
        return self._special[name]

    def _made(self, name: str) -> np.ndarray:
        if name == "%laneid":
            return self.lane_in_warp
        base, _, axis = name.partition(".")
        at = "xyz".index(axis)
        sizes = {"%ntid": self.launch.block, "%nctaid": self.launch.grid}
        if base in sizes:
            return np.full(self.num_lanes, sizes[base][at])
        number, size = {
            "%tid": (self.lane % self.launch.num_threads, self.launch.block),
            "%ctaid": (self.numbers[self.block_of], self.launch.grid),
        }[base]
        return number // int(np.prod(size[:at])) % size[at]

    def symbol(self, name: str) -> int:
        if name not in self.launch.symbols:
            raise UnknownInstruction(f"operand {name!r}")
        return self.launch.symbols[name]

    def parameter(self, name: str, offset: int, dtype: np.dtype):
        raw = self.launch.parameters[name]
        assert offset + dtype.itemsize <= len(raw), (name, offset, dtype)
        return np.frombuffer(raw, dtype, 1, offset)[0]

    # ---- checks -------------------------------------------------------------------------------

    def fault(self, kind: type[Fault], at: int, text: str, lanes=None) -> Fault:
        """A fault of lane `at`, or of that one of `lanes`."""
        lane = at if lanes is None else lanes[at]
        thread = self.launch.thread(int(self.thread_number[lane]))
        return kind(f"{self.launch.kernel.name}: {self.place}, {thread}: {text}")

    def refuse(self, kind: type[Fault], bad, text: str, lanes=None) -> None:
        """Raises a fault of the first lane (of `lanes`, if given) that is bad, if there is one."""
        if bad.any():
            raise self.fault(kind, int(bad.argmax()), text, lanes)

    @property
    def place(self) -> str:
        return f"{self.current} ({self.current.line})"

    def check_defined(self, groups, mask, what: str) -> None:
        for reads in groups:
            undefined = self.undefined_of(reads)
            if undefined is not None:
                bad = undefined != 0 if mask is None else (undefined != 0) & mask
                self.refuse(Uninitialised, bad, f"{what} was never given a value")

    def check_members(self, members, mask, needs_all: bool = False) -> None:
        """Checks that the active lanes of each warp that has any are those that the instruction
        names; with `needs_all`, all of the warp."""
        wanted = np.broadcast_to(members, self.num_lanes).astype(np.uint32)
        named = (wanted >> self.lane_in_warp.astype(np.uint32)) & np.uint32(1) != 0
        active = np.ones(self.num_lanes, bool) if mask is None else mask
        rows = active.reshape(-1, WARP)
        is_running = rows.any(axis=1).repeat(WARP)
        bad = is_running & (active != (True if needs_all else named))
        self.refuse(BadShuffle, bad, "the lanes it names are not those that execute it")

    def check_sources(self, mask, index) -> None:
        self.refuse(BadShuffle, mask & ~mask[index], "reads from a lane that is not active")

    def warps_of(self, mask) -> np.ndarray:
        """Numbers of warps with active lanes."""
        if mask is None:
            return np.arange(self.num_lanes // WARP)
        return np.flatnonzero(mask.reshape(-1, WARP).any(axis=1))

    # ---- memory -------------------------------------------------------------------------------

    def places(self, address, reads: Reads, mask):
        """(lane numbers, None for all; their addresses) of an access; `mask` may be lane
        numbers."""
        lanes = mask if mask is None or mask.dtype != bool else np.flatnonzero(mask)
        undefined = self.undefined_of(reads)
        if undefined is not None:
            bad = undefined != 0 if lanes is None else undefined[lanes] != 0
            self.refuse(Uninitialised, bad, "the address was never given a value", lanes)
        whole = np.broadcast_to(address, self.num_lanes)
        return lanes, np.ascontiguousarray(whole if lanes is None else whole[lanes])

    def wait_for_last(self, mask) -> None:
        self.has_waited[slice(None) if mask is None else mask] = True

    def check_waited(self) -> None:
        self.refuse(TooEarly, ~self.has_waited, "ends without having waited for the launch before")

    def _refuse_early(self, places, lanes, size: int, *, is_read: bool) -> None:
        """Refuses accesses to memory of other launches by lanes that have not waited for the one
        before."""
        waits = ~(self.has_waited if lanes is None else self.has_waited[lanes])
        if waits.any():
            for first, num_bytes in self.launch.early if is_read else ():
                end = np.uint64(first + num_bytes - size)
                waits &= (places < np.uint64(first)) | (places > end)
            self.refuse(TooEarly, waits, "does not wait for the launch before", lanes)

    def load(self, space: str, places, lanes, size: int):
        """(u8 [lanes, size]; which of these bytes have no value, None if all have one)."""
        if space == "global":
            self._refuse_early(places, lanes, size, is_read=True)
        if space in ("global", "const"):
            note = None if space == "const" else (lambda *what: self._note(size, lanes, *what))
            memory = self.launch.memory
            return self._checked(lanes, global_memory.load, memory, places, size, note), None
        row = self._rows(space, places, lanes, size)
        written = self.written[space].reshape(-1, size)[row]
        unwritten = None if written.all() else ~written
        if space == "shared":
            self._note_shared(row, size, lanes, None)
        return self.bytes[space].reshape(-1, size)[row], unwritten

    def store(self, space: str, places, lanes, value, unwritten) -> None:
        if space == "global":
            self._refuse_early(places, lanes, value.shape[1], is_read=False)
            if unwritten is not None:
                bad = unwritten.any(axis=1)
                self.refuse(Uninitialised, bad, "stores an undefined value", lanes)
            note = lambda *what: self._note(value.shape[1], lanes, *what, value)  # noqa: E731
            self._checked(lanes, global_memory.store, self.launch.memory, places, value, note)
            return
        row = self._rows(space, places, lanes, value.shape[1])
        self.bytes[space].reshape(-1, value.shape[1])[row] = value
        self.written[space].reshape(-1, value.shape[1])[row] = (
            True if unwritten is None else ~unwritten
        )
        if space == "shared":
            self._note_shared(row, value.shape[1], lanes, value)

    def _checked(self, lanes, function, *arguments):
        try:
            return function(*arguments)
        except Outside as error:
            raise self.fault(error.kind, *error.args, lanes) from None

    def _rows(self, space: str, places, lanes, size: int) -> np.ndarray:
        """Numbers of rows of `size` bytes in a space's array."""
        base = np.uint64(SHARED_BASE if space == "shared" else 0)
        offset = (places - base).astype(np.int64)
        bad = (offset < 0) | (offset + size > self.limit[space])
        if bad.any():
            text = f"byte {offset[bad.argmax()]} of {self.limit[space]} of {space} memory"
            self.refuse(OutOfBounds, bad, text, lanes)
        self._checked(lanes, check_alignment, places, size)
        owner = self.owner_of[space]
        owner = owner if lanes is None else owner[lanes]
        return (owner * self.pitch[space] + offset) // size

    # ---- order --------------------------------------------------------------------------------

    def _access(self, size, offset, lanes, value) -> Access:
        chosen = self.lane if lanes is None else lanes
        return Access(
            instruction=self.place,
            size=size,
            offset_N=offset,
            thread_N=self.thread_number[chosen],
            block_epoch_N=self.block_epoch[self.block_of[chosen]],
            warp_epoch_N=self.warp_epoch[chosen // WARP],
            value_N=value,
        )

    def _note(self, size, lanes, buffer, places, which, value=None) -> None:
        """Remembers an access to global memory until the launch ends, except reads of read-only
        memory."""
        if value is None and buffer.is_read_only:
            return
        if which is not None:
            lanes = which if lanes is None else lanes[which]
            value = None if value is None else value[which]
        offset = (places - np.uint64(buffer.base)).astype(np.int64)
        self.launch.log.setdefault(buffer, []).append(self._access(size, offset, lanes, value))

    def _note_shared(self, row, size, lanes, value) -> None:
        """Remembers an access to shared memory until all lanes pass a barrier together."""
        offset = row * size
        self.shared_log.append(self._access(size, offset, lanes, value))
        unit = (offset[:, None] // self.unit + np.arange(max(1, size // self.unit))).reshape(-1)
        if value is None:
            self.is_read[unit] = True
            return
        lane = (self.lane if lanes is None else lanes).astype(np.int32)
        lane = lane.repeat(max(1, size // self.unit))
        before = self.last_writer[unit]
        self.last_writer[unit] = lane
        if not self.may_race:
            self.may_race = bool(((before >= 0) & (before != lane)).any()) or bool(
                (self.last_writer[unit] != lane).any()
            )

    def _check_shared(self) -> None:
        """Raises for a race since all lanes last passed a barrier together."""
        if not self.shared_log:
            return
        if self.may_race or (self.is_read & (self.last_writer >= 0)).any():
            race = find_race(self.shared_log, self.unit, self.launch.num_threads)
            if race is not None:
                where = f"byte {race.offset % self.pitch['shared']} of shared memory"
                raise DataRace(self.launch.describe_race(race, where))
        self.shared_log = []
        self.last_writer[:] = -1
        self.is_read[:] = False
        self.may_race = False

    def pass_warp_barrier(self, mask) -> None:
        passed = np.zeros(len(self.warp_epoch), np.int32)
        passed[self.warps_of(mask)] = 1
        self.warp_epoch = self.warp_epoch + passed

    # ---- control ------------------------------------------------------------------------------

    def run(self) -> None:
        code = self.launch.code.blocks
        end = len(code)
        next_of = np.zeros(self.num_lanes, np.int32)  # each lane's next block
        waits = np.zeros(self.num_lanes, bool)
        here, mask = 0, None
        while True:
            block = code[here]
            self._execute(block, mask)
            target = self._target(block, here, mask, end)
            if block.is_barrier:
                self._arrive(mask, waits)
            if mask is None and isinstance(target, int):
                if target == end:
                    break
                here = target
                continue
            next_of = target if mask is None else np.where(mask, target, next_of)
            here, mask = self._choose(next_of, waits, end)
            if here is None:
                break
        self._check_shared()

    def _execute(self, block: Block, mask) -> None:
        for instruction, step in block.steps:
            self.current = instruction
            step(self, mask)
        self.launch.count(block, self.num_lanes if mask is None else int(mask.sum()))

    def _target(self, block: Block, here: int, mask, end: int):
        """The block where lanes continue: one for all, or an array."""
        target = here + 1 if block.target is None else block.target
        if block.index is not None:
            return self._indexed(block, mask)
        if block.is_exit:
            target = end
        if block.guard is None:
            return target
        self.current = block.last
        self.check_defined([((block.guard, ALL_BYTES),)], mask, "the condition of a branch")
        jumps = self.value[block.guard] != block.is_guard_negated
        if mask is None:
            if jumps.all():
                return target
            if not jumps.any():
                return here + 1
        return np.where(jumps, target, here + 1)

    def _indexed(self, block: Block, mask):
        """The block where each lane continues after a branch by a table."""
        self.current, index = block.last, self.value[block.index]
        self.check_defined([((block.index, ALL_BYTES),)], mask, "the index of a branch")
        is_outside = index >= len(block.targets)
        bad = is_outside if mask is None else is_outside & mask
        self.refuse(OutOfBounds, bad, f"an index of {len(block.targets)} branches")
        return block.targets[np.where(is_outside, 0, index)]

    def _arrive(self, mask, waits: np.ndarray) -> None:
        """All lanes pass together, or the active ones wait for the others of their thread block."""
        if mask is None:
            self.block_epoch = self.block_epoch + 1
            self._check_shared()
            return
        rows = mask.reshape(-1, WARP)
        divided = rows.any(axis=1) & ~rows.all(axis=1)
        self.refuse(BadBarrier, divided.repeat(WARP), "a part of a warp is at a barrier")
        waits |= mask
        is_complete = waits.reshape(self.num_blocks, -1).all(axis=1)
        self.block_epoch = self.block_epoch + is_complete
        waits &= ~is_complete[self.block_of]

    def _choose(self, next_of, waits, end):
        """The first basic block with lanes that can run, and these lanes, None if all; (None, None)
        at the end."""
        can_run = (next_of != end) & ~waits
        if not can_run.any():
            self.refuse(BadBarrier, waits, "waits for threads that have ended")
            return None, None
        here = int(next_of[can_run].min())
        mask = can_run & (next_of == here)
        return here, None if mask.all() else mask

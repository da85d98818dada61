"""Programs and their launches on a grid. See the package's docstring."""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ptx.blocks import Block, decode
from ptx.faults import DataRace
from ptx.lanes import SHARED_BASE, WARP, Machine
from ptx.memory import READ, STORED, Memory
from ptx.races import find_race
from ptx.text import BYTES, Kernel, parse

LANES = 1 << 14  # threads at once
_FORMATS = {"f32": "<f", "f64": "<d"}


@dataclass(kw_only=True)
class Record:
    """What a launch did. Threads for which an instruction's guard is false are counted too."""

    reads: list[tuple[int, int]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    num_instructions: Counter = field(default_factory=Counter)  # by opcode, once per lane group
    num_lane_instructions: Counter = field(default_factory=Counter)  # by opcode, for each thread


class Program:
    """A module of PTX text."""

    def __init__(self, text: str):
        self.module = parse(text)
        self._code: dict[str, list[Block]] = {}
        self._values: dict[str, np.ndarray] = {}  # bytes of global and constant variables
        for variable in self.module.variables:
            if variable.space in ("global", "const"):
                whole = np.zeros(variable.num_bytes + 32, np.uint8)
                at = -whole.ctypes.data % 16
                data = whole[at : at + variable.num_bytes]
                given = np.frombuffer(variable.values or b"", np.uint8)
                data[: len(given)] = given
                self._values[variable.name] = data

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: list,
        memory: Memory,
        shared_bytes: int = 0,
        early: Sequence[tuple[int, int]] | None = None,
    ) -> Record:
        kernel = self._kernel(name)
        if name not in self._code:
            self._code[name] = decode(kernel)
        grid, block = ((*sizes, 1, 1)[:3] for sizes in (grid, block))
        launch = Launch(self, kernel, self._code[name], grid, block, args, memory, shared_bytes)
        launch.early = early
        own = [(data.ctypes.data, len(data), key) for key, data in self._values.items()]
        for address, size, key in own:
            memory.add(address, size, name=key, is_writable=False)
        try:
            memory.begin_launch()
            return launch.run()
        finally:
            for address, *_ in own:
                memory.remove(address)

    def _kernel(self, name: str) -> Kernel:
        assert name in self.module.kernels, (name, *self.module.kernels)
        return self.module.kernels[name]

    def address_of(self, name: str) -> int | None:
        return self._values[name].ctypes.data if name in self._values else None


class Launch:
    """One launch: the state that all parts of its grid share."""

    def __init__(self, program, kernel, code, grid, block, args, memory, shared_bytes):
        self.program, self.kernel, self.code, self.memory = program, kernel, code, memory
        self.grid, self.block = grid, block
        self.num_threads = block[0] * block[1] * block[2]
        assert self.num_threads % WARP == 0 and 0 < self.num_threads <= 1024, block
        if kernel.num_threads is not None:
            assert self.num_threads == kernel.num_threads, (block, kernel.num_threads)
        self.parameters = _packed(kernel, args)
        self.symbols, self.shared_bytes, self.local_bytes = _layout(program, kernel, shared_bytes)
        self.log: dict = {}  # accesses of each buffer
        self.early: Sequence[tuple[int, int]] | None = None  # see the package's docstring
        self.record = Record()

    def run(self) -> Record:
        num_blocks = self.grid[0] * self.grid[1] * self.grid[2]
        at_once = max(1, LANES // self.num_threads)
        with np.errstate(all="ignore"):
            for first in range(0, num_blocks, at_once):
                numbers = np.arange(first, min(first + at_once, num_blocks))
                machine = Machine(self, numbers)
                machine.run()
                machine.check_waited()
        self._check_races()
        self.record.reads = self.memory.touched(READ)
        self.record.writes = self.memory.touched(STORED)
        return self.record

    def _check_races(self) -> None:
        for buffer in self.memory.conflicting:
            accesses = self.log[buffer]
            unit = min(8, min(access.size for access in accesses))
            if (race := find_race(accesses, unit, self.num_threads)) is not None:
                where = f"byte {race.offset + buffer.base - buffer.start} of {buffer.name}"
                raise DataRace(self.describe_race(race, where))

    def describe_race(self, race, where: str) -> str:
        first, second = (self.thread(t) for t in (race.first_thread, race.second_thread))
        return (
            f"{self.kernel.name}: {where}: {race.first} by {first} and {race.second} by {second}, "
            "with no barrier between"
        )

    def thread(self, number: int) -> str:
        return f"block {number // self.num_threads} thread {number % self.num_threads}"

    def count(self, block: Block, lanes: int) -> None:
        for opcode, number in block.opcodes.items():
            self.record.num_instructions[opcode] += number
            self.record.num_lane_instructions[opcode] += number * lanes


def _packed(kernel: Kernel, args: list) -> dict[str, bytes]:
    assert len(args) <= len(kernel.parameters), (kernel.name, len(args), len(kernel.parameters))
    values = [getattr(arg, "value", arg) for arg in args]
    values += [0] * (len(kernel.parameters) - len(args))
    packed = {}
    for parameter, value in zip(kernel.parameters, values, strict=True):
        if form := _FORMATS.get(parameter.type):
            packed[parameter.name] = struct.pack(form, value)
        else:
            size = BYTES[parameter.type]
            whole = int(value or 0) % (1 << 8 * size)
            packed[parameter.name] = whole.to_bytes(size, "little")
    return packed


def _layout(program: Program, kernel: Kernel, shared_bytes: int):
    """(addresses of variables, bytes of shared memory, bytes of each thread's local memory)."""
    symbols, shared, local = {}, 0, 0
    variables = [*program.module.variables, *kernel.variables]
    for variable in variables:
        if variable.space == "local":
            local = -(-local // variable.align) * variable.align
            symbols[variable.name] = local
            local += variable.num_bytes
        elif variable.space == "shared" and variable.num_bytes:
            shared = -(-shared // variable.align) * variable.align
            symbols[variable.name] = SHARED_BASE + shared
            shared += variable.num_bytes
        elif variable.space in ("global", "const"):
            symbols[variable.name] = program.address_of(variable.name)
    shared = -(-shared // 16) * 16
    for variable in variables:
        if variable.space == "shared" and not variable.num_bytes:  # the launch gives its size
            symbols[variable.name] = SHARED_BASE + shared
    return symbols, shared + shared_bytes, local

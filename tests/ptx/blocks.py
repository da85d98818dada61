"""A kernel's instructions as functions, grouped in basic blocks."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ptx.faults import UnknownInstruction
from ptx.floats import FLOAT
from ptx.integers import INTEGER, sum_with_carry
from ptx.moves import MOVE
from ptx.operands import ALL_BYTES, Registers
from ptx.tensor_cores import TENSOR_CORES
from ptx.text import BYTES, Instruction, Kernel
from ptx.warps import WARPS, warp_barrier

FACTORIES = {**INTEGER, **FLOAT, **MOVE, **WARPS, **TENSOR_CORES}


@dataclass(kw_only=True)
class Block:
    """Steps, then a jump to `target` or an exit of the lanes for which the guard holds, a jump to
    the one of `targets` that the register `index` says, or a barrier, or nothing."""

    steps: list[tuple[Instruction, Callable]] = field(default_factory=list)
    opcodes: Counter = field(default_factory=Counter)
    last: Instruction
    target: int | None = None
    targets: np.ndarray | None = None
    index: int | None = None
    guard: int | None = None
    is_guard_negated: bool = False
    is_exit: bool = False
    is_barrier: bool = False


@dataclass(frozen=True, kw_only=True)
class Code:
    blocks: list[Block]
    registers: list[np.dtype]
    shared_unit: int  # bytes of the narrowest access to shared memory, at most 4


def decode(kernel: Kernel) -> Code:
    registers = Registers.of(kernel.registers)
    blocks = [_block(kernel, instructions, registers) for instructions in kernel.blocks]
    sizes = [
        BYTES[opcode.split(".")[-1]] * (int(opcode.split(".v")[1][0]) if ".v" in opcode else 1)
        for block in blocks
        for opcode in block.opcodes
        if opcode.startswith(("ld.shared", "st.shared"))
    ]
    return Code(
        blocks=blocks,
        registers=[registers.dtype(number) for number in range(len(registers.types))],
        shared_unit=min([4, *sizes]),
    )


def _block(kernel: Kernel, instructions: list[Instruction], registers: Registers) -> Block:
    block = Block(last=instructions[-1], opcodes=Counter(i.opcode for i in instructions))
    for instruction in instructions:
        try:
            if not _ends(block, instruction, kernel, registers):
                block.steps.append((instruction, _step(instruction, registers)))
        except (UnknownInstruction, ValueError, KeyError, IndexError) as error:
            raise UnknownInstruction(
                f"{kernel.name}: {instruction} ({instruction.line}): {error}"
            ) from error
    return block


def _ends(block: Block, instruction: Instruction, kernel: Kernel, registers: Registers) -> bool:
    """Whether an instruction ends its block; the block then records it."""
    opcode = instruction.opcode
    if opcode in ("bra", "bra.uni"):
        (label,) = instruction.operands
        block.target = kernel.block_of[label]
    elif opcode in ("brx.idx", "brx.idx.uni"):
        index, table = instruction.operands
        if instruction.guard:
            raise UnknownInstruction("an indexed branch of only some of the threads")
        block.index = registers.find(index)
        block.targets = np.array([kernel.block_of[label] for label in kernel.tables[table]])
    elif opcode in ("ret", "exit"):
        block.is_exit = True
    elif opcode in ("bar.sync", "barrier.sync.aligned", "barrier.sync"):
        if instruction.operands != ("0",) or instruction.guard:
            raise UnknownInstruction("a barrier for only some of the threads")
        block.is_barrier = True
    else:
        return False
    if instruction.guard:
        block.guard = registers.find(instruction.guard)
        block.is_guard_negated = instruction.is_guard_negated
    return True


def _step(instruction: Instruction, registers: Registers) -> Callable:
    name, *modifiers = instruction.opcode.split(".")
    operands = list(instruction.operands)
    if name == "bar":
        step = warp_barrier(name, modifiers, operands, registers)
    elif name == "addc" or (name == "add" and "cc" in modifiers):
        step = sum_with_carry(name, modifiers, operands, registers)
    elif name == "griddepcontrol":
        step = grid_dependency(modifiers)
    elif name in FACTORIES:
        step = FACTORIES[name](name, modifiers, operands, registers)
    else:
        raise UnknownInstruction("this instruction is not known")
    if instruction.guard is None:
        return step
    return _guarded(step, registers.find(instruction.guard), instruction.is_guard_negated)


def grid_dependency(modifiers: list[str]) -> Callable:
    """Waits for the launch before, or admits the next one, which needs no work here."""
    if modifiers == ["launch_dependents"]:
        return lambda machine, mask: None
    if modifiers != ["wait"]:
        raise UnknownInstruction("griddepcontrol." + ".".join(modifiers))
    return lambda machine, mask: machine.wait_for_last(mask)


def _guarded(step: Callable, guard: int, is_negated: bool) -> Callable:
    def run(machine, mask):
        machine.check_defined([((guard, ALL_BYTES),)], mask, "the guard")
        value = machine.value[guard]
        active = ~value if is_negated else value
        if mask is not None:
            active = active & mask
        if active.all():
            step(machine, mask)
        elif active.any():
            step(machine, active)

    return run

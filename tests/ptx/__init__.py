"""A functional executor of PTX for the tests: it runs kernels that Triton has compiled, on the CPU,
and checks every access.

    memory = Memory()
    memory.add(address, num_bytes, name="x")            # bytes of this process, at their address
    memory.add_tensor(tensor, name="out", is_written=False)
    program = Program(text)    # this and a launch may raise UnknownInstruction
    record = program.launch(
        "_dot", grid=(4, 1, 1), block=(128, 1, 1), args=[address, 3, 0.5], memory=memory,
        shared_bytes=2048,
    )

**Memory.** Global memory is this process's own memory at its own addresses: a launch reads and
writes CPU tensors in place. Only registered memory may be accessed. `add` takes an address range,
as an allocator hands it out; `is_written=False` says that its bytes have no value yet: reading
them is an error until a kernel has given them one; `is_writable=False` forbids stores.
`add_tensor` registers exactly the elements of a strided tensor, not the gaps between its rows;
several tensors may share a storage. `check_written(tensor)` raises if an element has no value yet.

**Arguments** are Python numbers or ctypes values in the order of the kernel's parameters; pointers
are addresses. Triton's kernels take two more pointers than their functions (unused scratch memory);
missing trailing arguments are 0.

**Results.** `launch` returns a `Record`: `reads` and `writes` list the accessed ranges as (address,
number of bytes), `num_instructions` and `num_lane_instructions` count by opcode. It raises a
`Fault` (see faults.py) that names the kernel, the instruction, the source line and the first block
and thread: OutOfBounds, Misaligned, Uninitialised, DataRace, BadBarrier, BadShuffle. A launch with
`early`, a list of (address, number of bytes), may begin before the launch before it has ended
(`griddepcontrol`): only these ranges may be read before its wait, and every thread must wait; else
it is TooEarly. A launch is synchronous; after a fault, memory may be partly written.

**Execution.** All threads of all blocks (of as many blocks as fit `LANES`) run in lockstep as lanes
of numpy arrays. The lanes at the lowest basic block run first, so that lanes separated by a branch
reconverge; a barrier releases the lanes of its thread block. Blocks and threads are ordered only by
barriers: accesses that would depend on any other order are DataRaces, also between blocks of a
grid. Undefined values may be passed on, as in hardware, until an address, a branch or a store to
global memory depends on them.

**Numbers.** Whatever PTX defines to the bit is exact to the bit (fma with one rounding, denormals,
.ftz, conversions). Approximate instructions return the exact result with an error of up to what the
PTX manual allows, whose sign and size depend on a hash of the operand, so that nothing can rely on
the last bits (arithmetic.APPROXIMATE).

`kernels.PtxKernels` holds the runtime's GPU kernels, with Triton's launches executed here.
"""

from ptx.faults import (
    BadBarrier,
    BadShuffle,
    DataRace,
    Fault,
    Misaligned,
    OutOfBounds,
    TooEarly,
    Uninitialised,
    UnknownInstruction,
)
from ptx.machine import Program, Record
from ptx.memory import Memory

__all__ = [
    "BadBarrier",
    "BadShuffle",
    "DataRace",
    "Fault",
    "Memory",
    "Misaligned",
    "OutOfBounds",
    "Program",
    "Record",
    "TooEarly",
    "Uninitialised",
    "UnknownInstruction",
]

"""A functional executor of PTX: kernels that Triton compiles run on the CPU, with every access
checked. A tool of the tests.

    memory = Memory()
    memory.add(address, num_bytes, name="x")            # bytes of this process, at their address
    memory.add_tensor(tensor, name="out", is_written=False)
    program = Program(text)                              # raises UnknownInstruction, which names it
    record = program.launch(
        "_dot", grid=(4, 1, 1), block=(128, 1, 1), args=[address, 3, 0.5], memory=memory,
        shared_bytes=2048,
    )

**Memory.** Global memory is this process's own memory at its own addresses: a launch reads and
writes CPU tensors in place. Only what is registered may be touched. `add` takes an address range,
as an allocator hands it out; `is_written=False` says that its bytes have no value yet, so that
reading them is an error until a kernel or `mark_written(address, num_bytes)` (a copy into it) has
given them one; `is_writable=False` forbids stores. `remove(address)` ends a range: later accesses
are errors. `add_tensor` registers exactly the elements of a strided tensor, not the gaps between
its rows; several tensors may share a storage. `read_back(address, num_bytes)` raises if a byte of
the range was never written, for copies out of it.

**Arguments** are Python numbers or ctypes values in the order of the kernel's parameters; pointers
are addresses. Launches by a C interface give an array of pointers to values instead:
`program.arguments(name, address_of_that_array)` reads it by the parameters' types. Triton's kernels
take two more pointers (scratch that they do not use, for which 0 will do) than their functions;
missing trailing arguments are 0.

**Results.** `launch` returns a `Record`: `reads` and `writes` are lists of (address, number of
bytes) that were touched, `num_instructions` and `num_lane_instructions` count by instruction. It
raises a `Fault` (see faults.py) that names the kernel, the instruction, the source line and the
first block and thread: OutOfBounds, Misaligned, Uninitialised, DataRace, BadBarrier, BadShuffle.
A launch is synchronous; after a fault memory is half written.

**What is executed.** All threads of all blocks (of as many as fit `LANES`) run in step as lanes of
numpy arrays. The lanes at the lowest basic block run first, so that branches meet again; barriers
release the lanes of their block. Blocks and threads are ordered only by barriers: accesses that
would depend on any other order are DataRaces, also between blocks of a grid. Values without a
definition travel, as hardware lets them, until an address, a branch or a store to global memory
depends on them.

**Numbers.** Everything that PTX defines to the bit is to the bit (fma by one rounding, denormals,
.ftz, conversions). Approximate instructions return the exact result off by up to the error that the
PTX manual allows, up or down by a hash of the operand, so that nothing may rely on their last bits
(arithmetic.APPROXIMATE).

`kernels.PtxKernels` is the record of the runtime's GPU kernels with Triton's launches executed here.
"""

from ptx.faults import (
    BadBarrier,
    BadShuffle,
    DataRace,
    Fault,
    Misaligned,
    OutOfBounds,
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
    "Uninitialised",
    "UnknownInstruction",
]

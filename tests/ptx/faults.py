"""What a kernel must not do. A fault of a launch names the kernel, the instruction and the
place."""


class Fault(Exception):
    """A kernel breaks a rule of the machine."""


class OutOfBounds(Fault):
    """An access outside all registered memory or outside a block's shared or a thread's local
    memory, or a store to read-only memory."""


class Misaligned(Fault):
    """An address that is not a multiple of the access's size."""


class Uninitialised(Fault):
    """An address, a guard, the lane of a shuffle or a value stored to global memory that is
    undefined, or a read of global memory that was never written, or an output that was not
    filled."""


class DataRace(Fault):
    """Two threads access the same bytes, one of them writes, and no barrier lies between (races.py
    has the exceptions)."""


class BadBarrier(Fault):
    """A barrier that only a part of a warp reaches, or that some threads never reach."""


class BadShuffle(Fault):
    """A warp operation that is not executed by exactly the lanes it names, or by all of the warp
    where all must take part; or one that reads an inactive lane."""


class TooEarly(Fault):
    """A thread of a launch that may overlap with the one before accesses memory that is not its own
    before it has waited for that one, or ends without having waited."""


class UnknownInstruction(Exception):
    """The executor does not know an instruction, a modifier or an operand."""

"""What a kernel must not do. Each fault names the kernel, the instruction and the place."""


class Fault(Exception):
    """A kernel breaks a rule of the machine."""


class OutOfBounds(Fault):
    """An access outside all registered memory, or a store to read-only memory."""


class Misaligned(Fault):
    """An address that is not a multiple of the access's size."""


class Uninitialised(Fault):
    """An address, a branch or a stored value that depends on an undefined value."""


class DataRace(Fault):
    """Two threads touch the same bytes, one of them writes, and no barrier lies between."""


class BadBarrier(Fault):
    """A barrier that only a part of a warp reaches, or that some threads never reach."""


class BadShuffle(Fault):
    """A warp operation that is not executed by exactly the lanes it names, or reads an inactive
    one."""


class UnknownInstruction(Exception):
    """The executor does not know an instruction, a modifier or an operand."""

"""What a kernel must not do; each names the kernel, the instruction and where."""


class Fault(Exception):
    """A rule of the machine that a kernel breaks."""


class OutOfBounds(Fault):
    """An access outside of everything registered, or a store to what is read-only."""


class Misaligned(Fault):
    """An address that is no multiple of the access's size."""


class Uninitialised(Fault):
    """An address, a branch or a stored value that depends on what was never written."""


class DataRace(Fault):
    """Two threads touch the same bytes, one of them writes, and no barrier lies between."""


class BadBarrier(Fault):
    """A barrier that only a part of a warp reaches, or that some threads never reach."""


class BadShuffle(Fault):
    """A warp operation that some of the lanes it names do not execute."""


class UnknownInstruction(Exception):
    """The executor does not know an instruction, a modifier or an operand."""

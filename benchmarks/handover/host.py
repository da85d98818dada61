"""The functions of host.c."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from c_library import compiled

SOURCE = Path(__file__).with_name("host.c")
FLAGS = ("-fno-signed-zeros", "-fno-trapping-math", "-fassociative-math")
MOST_CALLS = 1024  # whose times a job keeps
LIMIT_NS = 1_000_000_000  # that the CPU waits for a flag


class JobStruct(ctypes.Structure):
    """`Job` of host.c."""

    _fields_ = [
        ("pool", ctypes.c_void_p),
        ("floats", ctypes.c_long),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("enter", ctypes.c_void_p),
        ("leave", ctypes.c_void_p),
        ("count", ctypes.c_long),
        ("capacity", ctypes.c_long),
        ("tid", ctypes.c_long),
        ("policy", ctypes.c_long),
        ("nice", ctypes.c_long),
        ("affinity", ctypes.c_long),
    ]


class Job:
    """What the CPU does for a layer: reads some floats by a pool, then 16 values of x, writes y."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, pool: int = 0, floats: int = 0) -> None:
        self.enter, self.leave = (torch.zeros(MOST_CALLS, dtype=torch.int64) for _ in range(2))
        self.struct = JobStruct(
            pool,
            floats,
            x.data_ptr(),
            y.data_ptr(),
            self.enter.data_ptr(),
            self.leave.data_ptr(),
            0,
            MOST_CALLS,
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


class Host:
    """The functions of host.c."""

    def __init__(self) -> None:
        self.library = c = compiled(SOURCE, *FLAGS)
        p, i, u = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
        for name, result, arguments in (
            ("hb_pool", p, (i, i, i, p)),
            ("hb_pool_free", None, (p,)),
            ("hb_job", None, (p,)),
            ("hb_serve", i, (p, p, i, i, p, u)),
            ("hb_ping", i, (p, p, i, p, u)),
            ("hb_awake", None, (i,)),
        ):
            function = getattr(c, name)
            function.restype, function.argtypes = result, list(arguments)
        self.job_function = ctypes.cast(c.hb_job, p).value or 0

    @contextmanager
    def pool(self, threads: int, spin_us: int, yields: bool, data: torch.Tensor) -> Iterator[int]:
        pool = self.library.hb_pool(threads, spin_us, int(yields), data.data_ptr())
        try:
            yield pool
        finally:
            self.library.hb_pool_free(pool)

    @contextmanager
    def awake(self, cores: int) -> Iterator[None]:
        self.library.hb_awake(cores)
        try:
            yield
        finally:
            self.library.hb_awake(0)

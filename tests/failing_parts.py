"""A fake GPU for the runtime's checks: the CPU in both roles, with parts that fail on purpose."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from hotsplit.artifacts.device_checks import DeviceKey
from hotsplit.runtime.check.parts import DeviceParts
from hotsplit.runtime.device.streams import HostNode, PlainStream
from hotsplit.runtime.kernels.gpu.kernels import Kernels, reference_kernels
from hotsplit.runtime.kernels.gpu.launch import overlap_options
from hotsplit.runtime.kernels.gpu.slots import SlotKernels, reference_slot_kernels
from hotsplit.runtime.step.hybrid_step import Backend, Prepare
from hotsplit.runtime.step.plain_backend import plain_backend

CPU = torch.device("cpu")
KEY = DeviceKey(
    index=0, device="Fake GPU", capability="8.9", memory_bytes=8 << 30, driver="1.2", torch="0",
    triton="0", package="0",
)  # fmt: skip


def nothing() -> None:
    """A part that works."""


def failing(message: str = "Fake error: no\nmore of it") -> Callable[..., None]:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError(message)

    return fail


def fake_parts(
    *,
    kernels: Callable[[], Kernels] = reference_kernels,
    stream: type[PlainStream] = PlainStream,
    doorbell_stream: type[PlainStream] | None = None,
    prepare: Prepare | None = None,
    **changes: object,
) -> DeviceParts:
    """Parts that work; `prepare` prepares a step with a graph. `doorbell_stream`: None is `stream`."""

    def backend(
        take, *, has_graph: bool, has_doorbells: bool = False, kernels: Kernels | None
    ) -> Backend:
        made = plain_backend(kernels or reference_kernels())
        used = doorbell_stream if has_doorbells and doorbell_stream else stream
        return dataclasses.replace(
            made,
            stream=lambda device: used(),
            prepare=prepare if has_graph and prepare else made.prepare,
        )

    parts = DeviceParts(CPU)
    works = dict.fromkeys(("pin", "limit", "wait", "free"), nothing)
    own = {
        "key": KEY,
        "kernels": kernels,
        "backend": backend,
        "hand_over_s": lambda backends: [1e-5] * len(backends),
        "can_overlap": False,
        "slot_kernels": reference_slot_kernels,
    }
    vars(parts).update(works | own | changes)
    return parts


# ---- kernels ------------------------------------------------------------------------------------


def with_kernel(name: str, wrong: Callable[[Callable], Callable]) -> Callable[[], Kernels]:
    """The reference with one kernel changed."""
    right = reference_kernels()
    return lambda: dataclasses.replace(right, **{name: wrong(getattr(right, name))})


def with_slot_kernel(name: str, wrong: Callable[[Callable], Callable]) -> Callable[[], SlotKernels]:
    """The same for the kernels of the neuron cache."""
    right = reference_slot_kernels()
    return lambda: dataclasses.replace(right, **{name: wrong(getattr(right, name))})


def raising(kernel: Callable) -> Callable:
    def run(*arguments: object, **options: object) -> None:
        raise ValueError("no such instruction\nand much more")

    return run


def idle(kernel: Callable) -> Callable:
    return lambda *arguments, **options: None


def halved(kernel: Callable) -> Callable:
    """Halves the floats that the kernel writes, and shifts its integers right by 16 bits."""

    def run(*arguments, **options) -> None:
        tensors = [each for each in (*arguments, *options.values()) if isinstance(each, Tensor)]
        before = [each.clone() for each in tensors]
        kernel(*arguments, **options)
        for values, was in zip(tensors, before, strict=True):
            if values.is_floating_point() and not torch.equal(
                values.nan_to_num(), was.nan_to_num()
            ):
                values.mul_(0.5)
            elif values.dtype == torch.int32 and not torch.equal(values, was):
                values.bitwise_right_shift_(16)

    return run


def halved_if_overlapping(kernel: Callable) -> Callable:
    wrong = halved(kernel)

    def run(*arguments, **options) -> None:
        (wrong if overlap_options()["OVERLAPS"] else kernel)(*arguments, **options)

    return run


# ---- streams ------------------------------------------------------------------------------------


class DeafStream(PlainStream):
    """A stream whose host functions do not run."""

    def host(self, node: HostNode) -> None:
        pass


class HalfDeafStream(PlainStream):
    """Runs only host functions without an argument, not those of a step."""

    def host(self, node: HostNode) -> None:
        if not node.argument:
            node.run()


def forgetful(stream, submit: Callable[[], None]) -> Callable[[], None]:
    """A graph that does nothing when it is replayed."""
    return lambda: None


class Forgotten(PlainStream):
    """A stream whose graphs do nothing, if `forgetting` prepares them."""


def forgetting(stream, submit: Callable[[], None]) -> Callable[[], None]:
    return forgetful(stream, submit) if isinstance(stream, Forgotten) else submit

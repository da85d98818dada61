"""The kernels of a decode step as kernels of the fake runtime: each call is one launch on torch's
current stream of the current device, with the memory that it reads and writes."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from fake_cuda import declared, library
from fake_cuda.library import Range
from fake_cuda.tensors import DeviceTensor, borrowed, range_of, ranges_of
from torch import Tensor

from hotsplit.runtime.kernels.gpu import kernels as records
from hotsplit.runtime.kernels.gpu.kernels import NAMES, Kernels
from hotsplit.runtime.kernels.gpu.own_kernels import OwnKernel
from hotsplit.runtime.kernels.gpu.slots import SlotKernels
from hotsplit.runtime.kernels.stored import StoredMatrix

# Names in kernels.py of the arguments that kernels write.
WRITTEN = {
    "dot": {"out_N"},
    "embed": {"out_D"},
    "unpack": {"out_AD"},
    "add_norm": {"out_D", "x_out_D", "copy_D"},
    "rotate_append": {"qkv", "key_CKW", "value_CKW", "query_THW"},
    "attend": {"scratch", "out_HW"},
    "attend_tokens": {"out_THW"},
    "predict": {"named_B", "copy_B"},
    "gate_up": {"hidden_N"},
    "down": {"parts_SD"},
    "choose_experts": {"routed_2K", "copy_2K"},
    "expert_gate_up": {"hidden_KF"},
    "expert_down": {"parts_PD"},
    "convolve": {"conv_SJC", "mixed_TX"},
    "delta_rule": {"state_SVNM", "out_TVM"},
    "gate_norm": {"out_TVM"},
    "multiply": {"out_TN"},
    "multiply_down": {"out_TD"},
    "round_tokens": {"out_TD", "power_T", "x_out_TD"},
    "hidden_tokens": {"out_TN", "power_T"},
}


def launched(kernels: Kernels) -> Kernels:
    """Wraps kernels that take CPU tensors, such as the reference: each call becomes a launch."""

    def own(kernel: OwnKernel) -> Callable[..., None]:
        signature = inspect.signature(kernel.reference)
        return partial(_launch, kernel.name, signature, kernel.writes, kernels.own(kernel))

    of_all = {
        name: partial(_launch, name, _signature(name), WRITTEN[name], getattr(kernels, name))
        for name in NAMES
    }
    return Kernels(**of_all, own=own)


def _signature(name: str) -> inspect.Signature:
    protocol = getattr(records, "".join(word.title() for word in name.split("_")))
    return inspect.signature(partial(protocol.__call__, None))


def _launch(
    name: str,
    signature: inspect.Signature,
    written: Collection[str],
    run: Callable[..., None],
    *args: Any,
    **options: Any,
) -> None:
    given = signature.bind(*args, **options).arguments
    ranges: list[Range] = []
    for argument, value in given.items():
        is_written = argument in written
        ranges += [range_of(t, is_written=is_written) for t in _tensors(name, value)]
    args, options = tuple(map(_borrowed, args)), {k: _borrowed(v) for k, v in options.items()}
    _submit(name, partial(run, *args, **options), ranges)


def launched_slots(kernels: SlotKernels) -> SlotKernels:
    """Wraps the kernels of the neuron cache. `scatter` counts as writing what its launch declares
    or, outside of a declared launch, the targets in `copies_C4`, which are read after a
    synchronisation."""

    def scatter(staging_B: Tensor, copies_C4: Tensor, most_bytes: int) -> None:
        ranges = ranges_of((staging_B, copies_C4))
        args = borrowed(staging_B), borrowed(copies_C4), most_bytes
        writes = declared.written()
        if writes is None:
            torch.cuda.synchronize()
            writes = [(target, size, True) for _, target, size, _ in args[1].tolist()]
        _submit("scatter", partial(kernels.scatter, *args), ranges + writes)

    def pack_open(hidden_N: Tensor, slot_F: Tensor, open_W: Tensor) -> None:
        args = borrowed(hidden_N), borrowed(slot_F), borrowed(open_W)
        ranges = ranges_of((hidden_N, slot_F), (open_W,))
        _submit("pack_open", partial(kernels.pack_open, *args), ranges)

    return SlotKernels(scatter=scatter, pack_open=pack_open)


def _submit(name: str, run: Callable[[], None], ranges: list[Range]) -> None:
    declared.check(name, ranges)
    library.launch(name, torch.cuda.current_stream().cuda_stream, run, ranges)


def on_device(name: str, tensor: Tensor) -> Tensor:
    """Returns the tensor. Raises ValueError, as Triton does, if a kernel cannot read it."""
    if not isinstance(tensor, DeviceTensor) and not tensor.is_pinned():
        raise ValueError(f"{name}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
    return tensor


def _tensors(name: str, value: object) -> Iterator[Tensor]:
    if isinstance(value, StoredMatrix):
        value = value.data
    for each in value.values() if isinstance(value, Mapping) else (value,):
        if isinstance(each, Tensor):
            yield on_device(name, each)


def _borrowed(value: Any) -> Any:
    if isinstance(value, StoredMatrix):
        return StoredMatrix(data=_borrowed(value.data), kind=value.kind, width=value.width)
    if isinstance(value, Mapping):
        return {name: borrowed(each) for name, each in value.items()}
    return borrowed(value) if isinstance(value, Tensor) else value

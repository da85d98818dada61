"""Tensors on a fake CUDA device, for a build of torch without CUDA.

A DeviceTensor reports cuda:n as its device; its memory comes from the fake runtime. torch passes
every operation on it to `Dispatch`, which does what torch does on a GPU. Views are made at once;
copies between devices or with the host (except of CPU scalars) are cudaMemcpyAsync, and other
operations are kernels: both are submitted to the device's current stream and run late. Operations
that wait for a real device also wait here (`item`, blocking copies, results whose size depends on
values)."""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import torch
from fake_cuda import library
from fake_cuda.devices import FakeCuda
from fake_cuda.library import Range
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class DeviceTensor(Tensor):
    """A tensor of a fake device; `memory` is a CPU tensor at its device addresses."""

    memory: Tensor
    dispatch: ClassVar["Dispatch | None"] = None  # of the fake_cuda block around the code

    @staticmethod
    def __new__(cls, memory: Tensor, index: int) -> "DeviceTensor":
        found = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=torch.device("cuda", index),
        )
        found.memory = memory
        return found

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def numpy(self, **options: object) -> np.ndarray:
        raise TypeError("can't convert a cuda tensor to numpy: copy it to host memory first")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **options: object) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert cls.dispatch is not None, f"{func} outside of a fake_cuda block"
        return cls.dispatch.__torch_dispatch__(func, types, args, kwargs)


def at_address(start: int, num_bytes: int, release: Callable[[], None] | None = None) -> Tensor:
    """Existing memory as uint8; `release` is called when no tensor uses it any more."""
    array = np.ctypeslib.as_array((ctypes.c_uint8 * max(1, num_bytes)).from_address(start))
    if release is not None:
        weakref.finalize(array, release).atexit = False
    return torch.from_numpy(array)[:num_bytes]


def shaped(memory: Tensor, like: Tensor) -> Tensor:
    return memory.view(like.dtype).as_strided(like.size(), like.stride())


def borrowed(tensor: Tensor) -> Tensor:
    """A CPU tensor on the same memory. It does not keep that memory from being freed."""
    tensor = memory_of(tensor)
    start, stop = span(tensor)
    return shaped(at_address(start, stop - start), tensor) if start else torch.empty_like(tensor)


def span(tensor: Tensor) -> tuple[int, int]:
    """(address of a tensor's first byte, address after its last); zeros for an empty tensor."""
    start = tensor.data_ptr() if tensor.numel() else 0
    return start, start + span_bytes(tensor)


def range_of(tensor: Tensor, *, is_written: bool) -> Range:
    start, stop = span(tensor)
    return start, stop - start, is_written


def ranges_of(reads: Iterable[Tensor], writes: Iterable[Tensor] = ()) -> list[Range]:
    found = [range_of(tensor, is_written=False) for tensor in reads]
    return found + [range_of(tensor, is_written=True) for tensor in writes]


class Dispatch(TorchDispatchMode):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.waited: list[str] = []  # operations that `_waiting` ran

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports the compiler, which takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        is_made = device is not None and torch.device(device).type == "cuda"
        if not is_made and not any(True for _ in device_tensors((args, kwargs))):
            if kwargs.get("pin_memory"):
                return self.pinned(func(*args, **{**kwargs, "pin_memory": False}))
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":
            return self._copied(*args, **kwargs)
        if name == "_to_copy":
            return self._moved(*args, **kwargs)
        if name == "_local_scalar_dense":
            self._wait(args[0].device.index)
            return args[0].memory.item()
        if torch.Tag.inplace_view in func.tags:  # e.g. squeeze_: the wrapper's shape changes, too
            func(*mapped(memory_of, args), **kwargs)
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return func(*args, **kwargs)
        if is_view(func):
            base = next(device_tensors(args))
            index = base.device.index
            with torch.inference_mode(base.is_inference()):  # as its views are
                found = func(*mapped(memory_of, args), **kwargs)
                return mapped(lambda view: DeviceTensor(view, index), found)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cuda":  # e.g. of empty_like
            return func(*mapped(meta_of, args), **kwargs)
        return self._kernel(func, name, args, kwargs)

    def _kernel(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        index = self._index(name, args, kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        outputs = written = written_arguments(func, args, kwargs)
        if written:
            if kwargs.get("generator") is None:  # refuses wrong shapes now, not when it runs
                with suppress(NotImplementedError):
                    func(*mapped(meta_of, args), **on_meta(kwargs))
            result = written[0] if len(written) == 1 else tuple(written)
        else:
            try:
                shapes = func(*mapped(meta_of, args), **on_meta(kwargs))
            except (NotImplementedError, RuntimeError):
                shapes = None
            if not all(isinstance(t, Tensor) for t in leaves(shapes)):
                return self._waiting(func, name, index, args, kwargs)
            result = mapped(lambda t: self._new(index, t), shapes)
            outputs = leaves(result)
            if name in _EMPTY:
                return result
        given = mapped(borrowed_of, (args, kwargs))
        targets = [] if written else [borrowed(t) for t in outputs]

        def run() -> None:
            found = leaves(compute(func, name, *given))
            for target, value in zip(targets, found, strict=bool(targets)):
                target.copy_(value)

        ranges = ranges_of(device_tensors((args, kwargs)), outputs)
        with self.cuda.on_device(index) as stream:
            library.launch(f"torch's {name}", stream, run, ranges)
        return result

    def _waiting(self, func: Any, name: str, index: int, args: Any, kwargs: Any) -> Any:
        """Waits for the device, then runs an operation that returns a Python value, or whose
        result's size depends on values."""
        self.waited.append(name)
        self._wait(index)
        found = compute(func, name, *mapped(memory_of, (args, kwargs)))
        return mapped(lambda t: self._uploaded(t, index) if isinstance(t, Tensor) else t, found)

    def _uploaded(self, value: Tensor, index: int) -> "DeviceTensor":
        made = self._new(index, value)
        with torch.inference_mode():
            made.memory.copy_(value)
        return made

    def _index(self, name: str, args: Any, kwargs: Any) -> int:
        """The device of an operation. All its tensors must be there, except CPU tensors without
        dimensions."""
        devices = {t.device.index for t in device_tensors((args, kwargs))}
        device = kwargs.get("device")
        if device is not None:
            asked = torch.device(device).index
            devices.add(torch.cuda.current_device() if asked is None else asked)
        on_host = [
            t
            for t in leaves((args, kwargs))
            if isinstance(t, Tensor) and not isinstance(t, DeviceTensor) and t.dim()
        ]
        if len(devices) > 1 or on_host:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, found some of {name} on"
                f" {sorted(f'cuda:{d}' for d in devices) + ['cpu'] * bool(on_host)}"
            )
        return devices.pop()

    def _new(self, index: int, like: Tensor) -> "DeviceTensor":
        size = span_bytes(like)
        start, release = self.cuda.allocate(index, size)
        return DeviceTensor(shaped(at_address(start, size, release), like), index)

    def pinned(self, values: Tensor) -> Tensor:
        start, release = self.cuda.pinned(values.nbytes)
        return shaped(at_address(start, values.nbytes, release), values).copy_(values)

    def _wait(self, index: int) -> None:
        with self.cuda.on_device(index) as stream:
            library.call("cudaStreamSynchronize", stream)

    def _moved(self, source: Tensor, *, dtype=None, device=None, non_blocking=False, **rest) -> Any:
        target = source.device if device is None else torch.device(device)
        if target.type == "cuda" and target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        like = torch.empty_like(meta_of(source), dtype=dtype or source.dtype)
        made = torch.empty(like.shape, dtype=like.dtype) if target.type == "cpu" else None
        if made is None:
            made = self._new(target.index, like)
        return self._copied(made, source, non_blocking)

    def _copied(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copies as aten/src/ATen/native/cuda/Copy.cu does: by kernels on a device, else as
        bytes."""
        if target.device == source.device or not source.dim() and source.device.type == "cpu":
            return self._kernel(aten.copy_.default, "copy_", (target, source), {})
        if not target.numel():
            return target
        index = (target if target.device.type == "cuda" else source).device.index
        if source.device.type == "cuda" and (
            source.dtype != target.dtype or not source.is_contiguous()
        ):
            like = torch.empty(source.shape, dtype=target.dtype, device="meta")
            made = self._new(source.device.index, like)
            source = self._kernel(aten.copy_.default, "copy_", (made, source), {})
        if source.device.type == "cpu":
            source = source.to(target.dtype)
        source = source.expand(target.shape).contiguous()
        direct = target
        if not target.is_contiguous():
            like = torch.empty(target.shape, dtype=target.dtype, device="meta")
            is_there = target.device.type == "cuda"
            direct = (
                self._new(index, like) if is_there else torch.empty(like.shape, dtype=like.dtype)
            )
        self._copy_bytes(direct, source, index, non_blocking)
        return target if direct is target else target.copy_(direct)

    def _copy_bytes(self, target: Tensor, source: Tensor, index: int, non_blocking: bool) -> None:
        is_between = target.device.type == source.device.type == "cuda"
        if is_between:  # on the source's stream, after the target's, which then waits for it
            theirs, mine = map(torch.cuda.current_stream, (source.device, target.device))
            theirs.wait_stream(mine)
            index = source.device.index
        with self.cuda.on_device(index) as stream:
            library.call(
                "cudaMemcpyAsync", target.data_ptr(), source.data_ptr(), source.nbytes, 4, stream
            )
            if not (non_blocking or is_between):
                library.call("cudaStreamSynchronize", stream)
        if is_between:
            mine.wait_stream(theirs)


def compute(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Computes a torch kernel on CPU tensors."""
    if func is aten.mm.dtype:  # missing on the CPU
        return args[0].to(args[2]) @ args[1].to(args[2])
    return func(*args, **kwargs)


def leaves(tree: Any) -> list[Any]:
    """The elements of nested tuples, lists and dicts, in which torch passes arguments."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, tuple | list):
        return [tree]
    return [leaf for part in tree for leaf in leaves(part)]


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same nesting with changed elements."""
    if isinstance(tree, dict):
        return {key: mapped(change, part) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [mapped(change, part) for part in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    return change(tree)


def device_tensors(tree: Any) -> Iterator[DeviceTensor]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, DeviceTensor))


def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[DeviceTensor]:
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += device_tensors(value)
    return found


def memory_of(leaf: Any) -> Any:
    return leaf.memory if isinstance(leaf, DeviceTensor) else leaf


def borrowed_of(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return borrowed(leaf)
    return leaf.clone() if isinstance(leaf, Tensor) else leaf  # a scalar, by value


def meta_of(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    found = mapped(meta_of, kwargs)
    return {**found, "device": torch.device("meta")} if "device" in found else found


def span_bytes(like: Tensor) -> int:
    if not like.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    return (last + 1) * like.element_size()

"""The runtime's GPU kernels with their launches compiled by Triton and executed as PTX on CPU
tensors.

The launching functions are the runtime's own, from copies of their modules in which the kernels
are replaced: grids, tiles and constants are those of a device."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from hotsplit.runtime.kernels.gpu import launch
from hotsplit.runtime.kernels.gpu.gpu_kernel import GpuKernel
from hotsplit.runtime.kernels.gpu.kernels import KERNELS, Kernels, overlapped
from ptx.compiler import COMPILER, Compiled, Pointer, Source
from ptx.machine import Program
from ptx.memory import Memory

PACKAGE = "hotsplit.runtime.kernels.gpu"
FOLDER = Path(launch.__file__).parent
MODULES = sorted(
    {each.reference.__module__.rpartition(".")[2] for each in KERNELS.values()} | {"tiles"}
)
# STORES: the parameters that each kernel may store to: those of the tensors that its contract says
# are written, or scratch. FILLS: one that it writes completely and never reads; it counts as
# uninitialised before a launch and must have all its values after it.
STORES = {
    **{
        f"_{each.name}": {name.rpartition("_")[0] or name for name in each.writes}
        for each in KERNELS.values()
        if each.name not in ("embed", "attend")  # launches of other kernels
    },
    "_unpack_tiles": {"out"},
    "_rotate_append": {"qkv", "query", "cache.0", "cache.1"},  # keys and values
    "_attend_part": {"sums", "peaks", "weights"},
    "_attend_join": {"out"},
    "_expert_sum": {"parts"},
    "_pack_open": {"open_W"},
}
# What no kernel of a step writes: all that may be read before a wait for the kernel before. Of
# states these are the slots that a pass reads.
WEIGHTS = {"data", "gate", "up", "bias", "gate_bias", "up_bias", "id_N", "state", "run"}
FILLS = {
    "_dot": "out",
    "_attend_join": "out",
    "_attend_tokens": "out",
    "_predict": "named",
    "_gate_up": "hidden",
    "_down": "parts",
    "_choose_experts": "routed",
    "_expert_gate_up": "hidden",
    "_expert_down": "parts",
    "_expert_sum": "parts",
    "_multiply": "out",
    "_round_tokens": "out",
    "_hidden_tokens": "out",
    "_pack_open": "open_W",
}


class PtxKernels:
    """`kernels`: the runtime's record of them. `num_lane_instructions`: instructions executed so
    far, by opcode; `launches`: for each kernel, how often each PTX text was launched.

    `edit` changes the PTX of a kernel, given (name, text), before it runs. `package` and `folder`
    name a changed copy of the kernels' sources. `overlaps`: each launch may begin before the one
    before it has ended."""

    def __init__(
        self,
        arch: int,
        *,
        edit: Callable[[str, str], str] | None = None,
        package: str = PACKAGE,
        folder: Path | None = None,
        overlaps: bool = False,
    ):
        self.arch, self.edit, self.package, self.folder = arch, edit, package, folder
        self.num_lane_instructions: Counter[str] = Counter()
        self.launches: dict[str, Counter[str]] = {}
        self.kernels = overlapped(self._record()) if overlaps else self._record()

    def _record(self) -> Kernels:
        modules = {name: self._module(name) for name in MODULES}
        modules["rows"].unpack_tiles = modules["tiles"].unpack_tiles

        def version(kernel: GpuKernel) -> Callable[..., None]:
            module = modules[kernel.reference.__module__.rpartition(".")[2]]
            return getattr(module, kernel.name).triton

        return Kernels(version)

    def _module(self, name: str) -> ModuleType:
        """A copy of a module in which the kernels are `PtxLaunch`."""
        folder = FOLDER if self.folder is None else self.folder / self.package
        spec = importlib.util.spec_from_file_location(
            f"{self.package}.{name}", folder / f"{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        if self.folder is not None and str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        spec.loader.exec_module(module)
        for kernel in STORES:
            if hasattr(module, kernel):
                folder_name = None if self.folder is None else str(self.folder)
                source = Source(package=self.package, module=name, name=kernel, folder=folder_name)
                setattr(module, kernel, PtxLaunch(self, source))
        return module


class PtxLaunch:
    """Takes the place of a kernel in its module: `kernel[grid](*arguments, **options)`."""

    def __init__(self, owner: PtxKernels, source: Source):
        self.owner, self.source = owner, source

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self._launch(grid, arguments, options)

    def _launch(self, grid: tuple[int, ...], arguments: tuple, options: dict) -> None:
        seen = tuple(_as_compiled(argument) for argument in arguments)
        compiled = COMPILER.compile(self.source, self.owner.arch, seen, options)
        text = compiled.ptx
        if self.owner.edit is not None:
            text = self.owner.edit(self.source.name, text)
        given = {}
        for argument, value in zip(compiled.argument_names, arguments, strict=False):
            parts = enumerate(value) if isinstance(value, tuple) else ()
            given |= {argument: value} | {f"{argument}.{i}": part for i, part in parts}
        given["launch_pdl"] = options.get("launch_pdl", False)
        self._execute(text, compiled, grid, given)

    def _execute(self, text: str, compiled: Compiled, grid, given: dict) -> None:
        name = self.source.name
        memory, early, values = Memory(), [], []
        for parameter in compiled.parameters:
            value = given[parameter]
            if isinstance(value, torch.Tensor):
                memory.add_tensor(
                    value,
                    name=parameter,
                    is_writable=parameter in STORES[name],
                    is_written=FILLS.get(name) != parameter,
                )
                if parameter in WEIGHTS:
                    early += [(row.data_ptr(), row.nbytes) for row in _rows_of(value)]
                value = value.data_ptr()
            values.append(value)
        if name == "_scatter":
            for _, target, num_bytes, _ in given["copies"].tolist():
                memory.add(target, num_bytes, name="a slot", is_written=False)
        record = program(text).launch(
            name,
            grid,
            (32 * compiled.num_warps,),
            values,
            memory,
            compiled.shared_bytes,
            early if given["launch_pdl"] else None,
        )
        self.owner.num_lane_instructions += record.num_lane_instructions
        self.owner.launches.setdefault(name, Counter())[text] += 1
        if name in FILLS:
            memory.check_written(given[FILLS[name]])


def _as_compiled(argument):
    """A stand-in with all that compiled code depends on: Triton specialises for types, for 1 and
    for multiples of 16."""
    if isinstance(argument, tuple):
        return type(argument)(*map(_as_compiled, argument))
    if isinstance(argument, torch.Tensor):
        return Pointer(argument.dtype, argument.data_ptr() % 16 == 0)
    if isinstance(argument, int) and not isinstance(argument, bool) and argument != 1:
        is_long = not -(1 << 31) <= argument < 1 << 31
        return (1 << 40 if is_long else 16) + (argument % 16 != 0)
    return 0.5 if isinstance(argument, float) else argument


def _rows_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Its contiguous parts."""
    return [tensor] if tensor.is_contiguous() else list(tensor)


@cache
def program(text: str) -> Program:
    return Program(text)

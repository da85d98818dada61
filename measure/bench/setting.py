"""The setting of a measurement: the model, the machine, and how the engine was loaded."""

from collections import Counter

import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.costs.part_bytes import is_predictor
from hotsplit.measure.bench.result import Setting
from hotsplit.measure.calibrate.cpu_bandwidth import last_cache_bytes
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.cpu import library
from hotsplit.system.processors import processor_name, processors


def setting_of(
    engine: Engine, plan: Split | None, num_threads: int, load_before: float | None
) -> Setting:
    model, types = engine.model, engine.cache_types
    is_gpu = engine.device.type == "cuda"
    on_gpu = len(engine.layers) if plan is None else sum(plan.dense_on_gpu)
    return Setting(
        model_type=f"{model.architecture} {format_count(num_params(model))} {main_kind(model)}",
        model_size=sum(entry.num_bytes for entry in model.tensors.values()),
        model_n_params=num_params(model),
        mode=engine.mode,
        device=str(engine.device),
        gpu_layers=on_gpu if is_gpu else 0,
        num_threads=num_threads,
        rows_a_pass=engine._live.most_tokens,
        type_k=types.key.name,
        type_v=types.value.name,
        cpu_name=processor_name(),
        gpu_name=torch.cuda.get_device_name(engine.device) if is_gpu else "",
        level=library.level(),
        last_cache_bytes=last_cache_bytes(),
        num_processors=processors().usable,
        load_before=load_before,
    )


def num_params(model: ModelFile) -> int:
    """The model's parameters, without predictors."""
    count = 0
    for name, entry in model.tensors.items():
        of_layer = name.split(".", 2)[-1] if name.startswith("blk.") else name
        if not is_predictor(of_layer):
            count += torch.Size(entry.shape).numel()
    return count


def main_kind(model: ModelFile) -> str:
    """The tensor type with the most bytes."""
    sizes: Counter[str] = Counter()
    for entry in model.tensors.values():
        sizes[entry.kind] += entry.num_bytes
    return sizes.most_common(1)[0][0]


def format_count(count: int) -> str:
    """A number of parameters as llama-bench writes it, e.g. 134.52 M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)

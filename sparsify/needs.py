"""Memory and disk that training takes, checked before it starts."""

import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.errors import HotsplitError
from hotsplit.model.spec import ModelSpec
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.sparsify.distillation import CHUNK_VALUES
from hotsplit.sparsify.student import MATRICES, checkpoint_name
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import free_memory_bytes

FREE_SHARE = 0.95
# Activations that autograd keeps per token and layer: bytes per unit of width, and values per
# neuron. For SmolLM2-135M in bf16 with 512 tokens per pass this predicts 3.44 GiB; at most 3.16 GiB
# were resident.
KEPT_WIDTHS, KEPT_NEURONS = 40, 14
PROGRAM_BYTES = 600 << 20  # Python, torch, transformers, products' own copies


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes by purpose."""

    frozen: int  # the matrices of attention, the embedding and the head
    dense: int  # the dense feed-forward matrices
    trained: int  # f32, with gradients, AdamW's moments, and a copy for products in bf16
    best: int  # a copy of the best state
    kept: int  # of the forward pass, for the backward pass
    logits: int

    @property
    def total(self) -> int:
        return (self.frozen + self.dense + self.trained + self.best + self.kept + self.logits
                + PROGRAM_BYTES)  # fmt: skip

    @property
    def line(self) -> str:
        return (
            f"{format_bytes(self.total)}: frozen {format_bytes(self.frozen)}, dense feed-forward"
            f" {format_bytes(self.dense)}, trained with optimizer {format_bytes(self.trained)}, best"
            f" state {format_bytes(self.best)}, a pass {format_bytes(self.kept + self.logits)},"
            f" program {format_bytes(PROGRAM_BYTES)}"
        )


def num_trained(spec: ModelSpec, config: SparsifyConfig) -> int:
    """Values that are trained: whole feed-forward matrices, or low-rank updates of them."""
    if config.rank is None:
        return 3 * spec.num_neurons * spec.hidden_size
    return 3 * config.rank * (spec.num_neurons + spec.num_layers * spec.hidden_size)


def needs_of(spec: ModelSpec, config: SparsifyConfig, dtype: torch.dtype, tied: bool) -> Needs:
    size = dtype.itemsize
    feed_forward = 3 * spec.num_neurons * spec.hidden_size
    heads = sum(a.query_size + a.qkv_size for a in spec.attentions) * spec.hidden_size
    outer = (1 if tied else 2) * spec.vocab_size * spec.hidden_size
    trained = num_trained(spec, config)
    kept = spec.num_layers * KEPT_WIDTHS * spec.hidden_size
    kept += KEPT_NEURONS * size * spec.num_neurons
    return Needs(
        frozen=(heads + outer) * size,
        dense=feed_forward * size,
        # the values, gradients, two moments, and a copy in the type of the products
        trained=trained * (16 + (size if size < 4 else 0)),
        best=trained * 4,
        kept=kept * config.micro_tokens,
        logits=4 * max(CHUNK_VALUES, spec.vocab_size) * 4,
    )


def check_memory(needs: Needs, device: torch.device, processes: int) -> str:
    """A line on the memory that is needed (on the CPU by all processes of this machine, on a GPU by
    one) and free.

    Raises HotsplitError if it does not fit."""
    if device.type == "cuda":
        free, wanted, where = torch.cuda.mem_get_info(device)[0], needs.total, "of the GPU"
    else:
        free, wanted, where = free_memory_bytes(), needs.total * processes, "of memory"
    times = f"{processes} x " if wanted != needs.total else ""
    line = f"takes {times}{needs.line}; {format_bytes(free)} {where} are free"
    if wanted > FREE_SHARE * free:
        raise HotsplitError(
            f"training {line}: it does not fit; give --rank 16, a smaller --micro-tokens, or"
            " fewer processes"
        )
    return line


STORED_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # per value, by safetensors' types
# Saved in f32: the values that are trained, AdamW's two moments, and the best values.
SAVED_BYTES = 4 * 4
SAVED_TWICE = 2  # a new state is written beside the old one


def checkpoint_bytes(dense: Checkpoint, num_layers: int) -> int:
    """Size of a trained checkpoint: trained matrices in f32, all others as they are."""
    trained = {checkpoint_name(i, name) for i in range(num_layers) for name in MATRICES}
    total = 0
    for name, tensor in dense.tensors.items():
        count = 4 if name in trained else STORED_BYTES[tensor.dtype]
        for size in tensor.shape:
            count *= size
        total += 0 if tensor.same_as is not None else count
    return total


def check_disk(
    config: SparsifyConfig, *, num_trained: int, checkpoint_bytes: int, output_bytes: int
) -> None:
    """Raises HotsplitError if a disk has too little room for the state, the checkpoints and the
    model files of a run. The room that an interrupted run's state and checkpoints already take is
    not counted again."""
    state = config.state_path
    goes_on = state.exists() and not config.force
    needed = [(state, SAVED_TWICE * num_trained * SAVED_BYTES - _size_of(state))]
    for share in config.targets:
        folder = config.checkpoint_of(share)
        needed.append((folder, checkpoint_bytes - (_size_of(folder) if goes_on else 0)))
        needed.append((config.output_of(share), output_bytes))
    places, total = dict[int, Path](), defaultdict[int, int](int)
    for path, count in needed:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        disk = there.stat().st_dev
        places.setdefault(disk, there)
        total[disk] += max(0, count)
    for disk, place in places.items():
        free = shutil.disk_usage(place).free
        if total[disk] > free:
            raise HotsplitError(
                f"{place}: {format_bytes(free)} free, about {format_bytes(total[disk])} needed for"
                " the training's state, checkpoints and model files; free space, name an output on"
                " another disk, or give --rank 16 or fewer --share"
            )


def _size_of(path: Path) -> int:
    """Bytes of a file or of the files in a folder; 0 if there is none."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())

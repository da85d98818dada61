"""The memory that `profile` takes, with all layers at once or one at a time, and the free memory.

Letters: T tokens of a chunk, D model width, F neurons of a layer."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import bytes_on_one_side, cache_bytes, is_predictor, layer_tensors
from hotsplit.costs.pass_length import SHORT_CHUNK
from hotsplit.errors import HotsplitError
from hotsplit.model.weight_types import BY_NAME
from hotsplit.profile.predictors.candidates import Choices
from hotsplit.profile.predictors.layer_trainer import KEPT_TOKENS
from hotsplit.runtime.step.workspace import workspace_bytes
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import free_memory_bytes

# The share of free memory that a profile may take: the rest is for other programs, and for
# fragmentation.
FREE_SHARE = 0.9
# Observers get a gate in f32 and derive magnitudes, bins (int64) and firings.
OBSERVER_BYTES_PER_VALUE = 32
# Code loaded on first use (10 MiB), temporaries of products and observers that nothing below
# counts, and freed memory that the C library keeps.
SLACK_BYTES = 24 << 20
_C = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class Room:
    """Memory of a device that a profile may take, beyond what this process has taken already."""

    num_bytes: int
    taken_bytes: int  # by this process, on the CPU under a limit; otherwise 0
    says: str  # the reason for the limit, for errors


@dataclass(frozen=True, kw_only=True)
class Needs:
    whole_bytes: int  # with all layers at once
    layer_bytes: int  # with one layer at a time, hidden states left out
    state_row_bytes: int  # of one token, between two layers


def room_of(device: torch.device, max_memory_bytes: int | None) -> Room:
    """The smaller of FREE_SHARE of the free memory and what `max_memory_bytes` leaves.

    On the CPU the latter bounds all resident memory: anonymous memory and pages of mapped files,
    the program's own included. On CUDA it bounds what torch allocates there. Raises HotsplitError
    if the resident memory is needed and unknown, and if the bound leaves nothing."""
    if device.type == "cuda":
        free, taken = int(FREE_SHARE * torch.cuda.mem_get_info(device)[0]), 0
    else:
        free = int(FREE_SHARE * free_memory_bytes())
        taken = 0 if max_memory_bytes is None else resident_bytes()
    if max_memory_bytes is None or max_memory_bytes - taken > free:
        return Room(num_bytes=free, taken_bytes=taken, says=f"{format_bytes(free)} are free")
    if max_memory_bytes <= taken:
        raise HotsplitError(
            f"max memory is {format_bytes(max_memory_bytes)}, but the program alone takes"
            f" {format_bytes(taken)}; give more"
        )
    return Room(
        num_bytes=max_memory_bytes - taken,
        taken_bytes=taken,
        says=f"max memory is {format_bytes(max_memory_bytes)}",
    )


def needs_of(
    model: ModelFile, *, window: int, context_length: int, choices: Choices | None
) -> Needs:
    """Estimates the memory to run `window` tokens at a time; `choices` describe the predictors to
    train, if any."""
    spec, layers = model.spec, model.spec.num_layers
    workspace = workspace_bytes(model, window, "exact")
    whole = bytes_on_one_side(model, context_length, workspace)
    whole["predictor"] = 0  # predictors are not run
    lasting, passing = (
        (0, 0) if choices is None else trainer_bytes(spec.hidden_size, spec.most_neurons, choices)
    )
    observers = OBSERVER_BYTES_PER_VALUE * min(SHORT_CHUNK, window) * spec.most_neurons
    one = max(streamed_layer_bytes(model, layer) for layer in range(layers))
    return Needs(
        whole_bytes=sum(whole.values()) + observers + layers * lasting + passing,
        layer_bytes=one + max(cache_bytes(model, layer, window, 1) for layer in range(layers)) + workspace + observers
        + lasting + passing + SLACK_BYTES,
        state_row_bytes=4 * spec.hidden_size,
    )  # fmt: skip


def streamed_layer_bytes(model: ModelFile, layer: int) -> int:
    """Bytes of a layer's weights without its predictor, and for a stock file 16 bytes per value of
    the down projection, which is unpacked (briefly in two copies) and transposed."""
    tensors = layer_tensors(model, layer).items()
    weights = sum(entry.num_bytes for name, entry in tensors if not is_predictor(name))
    is_stock = model.layout == "stock"
    return weights + (
        16 * model.spec.layers[layer].neurons.number * model.spec.hidden_size if is_stock else 0
    )


def trainer_bytes(width: int, num_neurons: int, choices: Choices) -> tuple[int, int]:
    """(lasting bytes, further bytes in a single operation) of one layer's
    profile.predictors.layer_trainer.LayerTrainer, estimated.

    The first: the gate matrix and its map, moments in f64, their start, every candidate in its
    type, the trained network's weights, gradients, Adam's two moments and the best weights, and the
    kept tokens. The second: the SVD of F x D in f64 with LAPACK's copies and workspace (at 3072 x
    1024 some 230 MiB, measured once), or a step's T x F values."""
    square, gate = width * width, num_neurons * width
    stored = sum(BY_NAME[kind].bytes_per_value for kind in choices.kinds)
    ranks = choices.ranks if "low-rank" in choices.forms else ()
    start = 4 * (2 * gate + 2 * square) + 4 * (min(width, num_neurons) * (num_neurons + width))
    candidates = stored * ("whole" in choices.forms) * gate
    candidates += stored * (sum(ranks) + max(ranks, default=0)) * (width + num_neurons)
    network = 20 * max(ranks, default=0) * (width + num_neurons)
    kept = KEPT_TOKENS * (4 * width + 5 * num_neurons)
    # The regression on the layer before needs the product of both, in f64.
    lasting = start + 8 * square + 8 * gate + round(candidates) + network + kept
    svd = 48 * gate + 96 * square
    return lasting, max(svd, 40 * max(SHORT_CHUNK, KEPT_TOKENS) * num_neurons)


def trim() -> None:
    """Returns freed memory to the system; does nothing without malloc_trim.

    Once a large block has been freed, glibc keeps later freed blocks of up to its size (at most
    32 MiB) for reuse. With a model of 417 MiB and a cap of 100 MiB above the start, memory peaked
    129 MiB above the start without calls, and 87 MiB above it with a call per chunk. The calls took
    at most 1 of 11 seconds (docs/log/profile.md)."""
    if hasattr(_C, "malloc_trim"):
        _C.malloc_trim(0)


def resident_bytes() -> int:
    """This process's resident memory. Raises HotsplitError if it is unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        kinds = ("RssAnon", "RssFile", "RssShmem")
        return sum(1024 * int(fields[kind].split()[0]) for kind in kinds)
    except (OSError, KeyError, ValueError) as error:
        raise HotsplitError(
            "max memory needs /proc/self/status (Linux), which shows what this process takes;"
            " leave it out"
        ) from error

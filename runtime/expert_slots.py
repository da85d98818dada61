"""Decides whether experts of a mixture are read from the drive while it runs, and how many of each
layer have slots in main memory.

Letters: L layers, E experts of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs.part_bytes import Items, most_units
from hotsplit.costs.pass_length import PREFILL_CHUNK
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry
from hotsplit.model.modes import Mode
from hotsplit.model.tensors import in_layout
from hotsplit.options.neuron_cache_options import CacheCosts, CacheOptions
from hotsplit.runtime.neuron_cache.policy import CachePolicy
from hotsplit.runtime.ops.structs import MAX_ROWS
from hotsplit.runtime.resolved_options import room_for_weights
from hotsplit.runtime.step.workspace import host_bytes
from hotsplit.runtime.weights.drive import Drive, transit_bytes, why_not
from hotsplit.system.sizes import format_bytes

# The part of the memory for slots that the temporaries of long passes over prompts may take: in a
# pass, each expert is read once.
LONG_SHARE = 0.125
_FIRST_SCORE = 0.1  # of an expert that a plan has in main memory


@dataclass(frozen=True, kw_only=True)
class ExpertSlots:
    """`num_slots_L`: of each layer, 0 in layers without experts."""

    drive: Drive
    num_slots_L: tuple[int, ...]
    items: Items  # of main memory, where they differ from those of the whole model

    def start(self, planned_LN: Sequence[np.ndarray | None] = ()) -> None:
        """Starts the drive's threads. Scores of experts begin at zero, or higher for those that a
        plan has in main memory (Split.resident_experts)."""
        num_layers, num_experts = len(self.num_slots_L), self.drive.num_experts
        first_LE = np.zeros((num_layers, num_experts))
        for layer, planned_N in enumerate(planned_LN):
            first_LE[layer, slice(None) if planned_N is None else planned_N] = _FIRST_SCORE
        none, zeros_L = np.zeros(0, np.int32), np.zeros(num_layers)
        times = {name: zeros_L for name in CacheCosts.__dataclass_fields__ if name.endswith("_L")}
        costs = CacheCosts(**times, rest_s=0.0, copy_s=0.0)
        policy = CachePolicy([none] * num_layers, first_LE, costs, CacheOptions(), "experts")
        self.drive.start(*policy.learning, policy)


def expert_slots(
    model: ModelFile,
    on_cpu: Items,
    ram_bytes: int | None,
    *,
    context_length: int,
    mode: Mode,
    num_sequences: int,
) -> ExpertSlots | None:
    """The slots of a model that is larger than main memory, on the CPU alone; None if it is not, or
    if its experts cannot be read one by one, or the rest is larger than what is free. `on_cpu`: the
    bytes of the whole model. Raises HotsplitError if the rest does not fit into `ram_bytes`."""
    room, layers = room_for_weights(ram_bytes), model.spec.layers
    if sum(on_cpu.values()) <= room or not model.spec.has_experts or model.layout != "stock":
        return None
    entries = {
        index: _experts_of(model, index)
        for index, layer in enumerate(layers)
        if layer.neurons.are_experts
    }
    if any(why_not(entry) for own in entries.values() for entry in own):
        return None
    # Of an embedding of its own, a token reads a row in the file.
    rest = sum(on_cpu.values()) - on_cpu["neurons"] - on_cpu["embedding"]
    rest += transit_bytes(entries)
    expert_L = {i: sum(e.num_bytes // e.shape[0] for e in own) for i, own in entries.items()}
    of_all, most_rows = sum(expert_L.values()), MAX_ROWS
    given = model, context_length, mode, num_sequences
    longer = host_bytes(*given, PREFILL_CHUNK) - host_bytes(*given)
    if longer <= LONG_SHARE * (room - rest):
        rest, most_rows = rest + longer, PREFILL_CHUNK
    num_slots = slots_in(room - rest, of_all)
    if num_slots < 1:
        if ram_bytes is None:
            return None
        needed = format_bytes(ram_bytes - room + rest + of_all)
        raise HotsplitError(
            f"{model.path}: with its experts on the drive, needs {needed} of main memory at least,"
            f" and --ram is {format_bytes(ram_bytes)}; give more, or a smaller --context"
        )
    num_slots_L = [
        min(num_slots, layer.neurons.num_experts) if index in entries else 0
        for index, layer in enumerate(layers)
    ]
    drive = Drive(model.path, entries, most_units(model.spec), most_rows)
    slot_bytes = sum(count * expert_L.get(index, 0) for index, count in enumerate(num_slots_L))
    items = {
        "neurons": slot_bytes + transit_bytes(entries),
        "embedding": 0,
        "workspace": on_cpu["workspace"] + longer * (most_rows > MAX_ROWS),
    }
    return ExpertSlots(drive=drive, num_slots_L=tuple(num_slots_L), items=items)


def slots_in(num_bytes: int, expert_bytes: int) -> int:
    """The slots of each layer; `expert_bytes`: one in every layer."""
    return num_bytes // expert_bytes


def _experts_of(model: ModelFile, layer: int) -> list[TensorEntry]:
    """Gate, up (if there is one) and down of a layer's experts."""
    neurons = model.spec.layers[layer].neurons
    down = in_layout(f"{neurons.down_name}.weight", model.layout)
    return [model.entry(layer, name) for name in (*(f"{n}.weight" for n in neurons.matrices), down)]

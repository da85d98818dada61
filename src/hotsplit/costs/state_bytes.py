"""The bytes of recurrent states, which are f32 and in slots
(hotsplit.runtime.cache.state_slots)."""

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.model.operations import Stateful
from hotsplit.options.generation_options import MOST_DRAFTED

SAVED_STATES = 2  # recurrent states that a sequence has at most besides its current one
MOST_KEPT = 1 + MOST_DRAFTED  # rows of a check whose inputs are kept


def state_bytes(model: ModelFile, layer: int) -> int:
    """Bytes of the states of one sequence in a layer; 0 in a layer without one."""
    return 4 * sum(block.num_state_values for block in _stateful(model, layer))


def slots_bytes(model: ModelFile, layer: int, num_sequences: int) -> int:
    """Bytes of all slots of a layer."""
    return num_slots(num_sequences) * state_bytes(model, layer)


def kept_bytes(model: ModelFile, layer: int, num_sequences: int) -> int:
    """Bytes of the inputs that a layer on the CPU keeps of rows; 0 in a layer without a state."""
    return 4 * num_kept(num_sequences) * sum(x.kept_size for x in _stateful(model, layer))


def _stateful(model: ModelFile, layer: int) -> tuple[Stateful, ...]:
    """The operations with a state of a layer, for the first with those before it."""
    before = tuple(block for block in model.spec.first if isinstance(block, Stateful))
    return (*(before if layer == 0 else ()), *model.spec.layers[layer].stateful)


def num_kept(num_sequences: int) -> int:
    """Rows of a layer whose inputs are kept: of each sequence those of a pass, while those of the
    one before are read."""
    return num_sequences * 2 * MOST_KEPT


def num_slots(num_sequences: int) -> int:
    """Recurrent states of a layer: of each sequence the current, a pass's, and saved ones."""
    return num_sequences * (2 + SAVED_STATES)

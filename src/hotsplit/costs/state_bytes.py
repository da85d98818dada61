"""The bytes of recurrent states, which are f32 and in slots
(hotsplit.runtime.cache.state_slots)."""

from hotsplit.artifacts.model_file import ModelFile

SAVED_STATES = 2  # recurrent states that a sequence has at most besides its current one


def state_bytes(model: ModelFile, layer: int) -> int:
    """Bytes of the recurrent state of one sequence in a layer; 0 in a layer without one."""
    recurrent = model.spec.layers[layer].recurrent
    return 0 if recurrent is None else 4 * recurrent.num_state_values


def slots_bytes(model: ModelFile, layer: int, num_sequences: int) -> int:
    """Bytes of all slots of a layer."""
    return num_slots(num_sequences) * state_bytes(model, layer)


def num_slots(num_sequences: int) -> int:
    """Recurrent states of a layer: of each sequence the current, a pass's, and saved ones."""
    return num_sequences * (2 + SAVED_STATES)

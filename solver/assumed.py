"""What a plan assumes of the neurons of a model without a profile.

Where every neuron is computed for every token (mode dense, or a model that has no other), nothing
remains to be counted. Which experts a mixture's tokens choose is known only from text; until then
an expert's share of the tokens may be assumed to fall with its rank r as r^-EXPONENT (Zipf's law),
at most 1.

Letters: L layers, F neurons of a layer, E experts, K of them chosen by a token, T tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import NUM_BINS, Profile, uneven
from hotsplit.costs.default_mode import computes_every_neuron
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode

# On Qwen's mixtures, profiles of text gave 60 % of the experts 93 % of the choices; 256 experts by
# this exponent give them 83 %, by 1 92 %, and by 0 60 %.
EXPONENT = 0.7
NUM_TOKENS, BLOCK_TOKENS = 2048, 32


def profile_for(model: ModelFile, path: Path | None, mode: Mode | None) -> Profile:
    """The profile at `path`; without one, that every neuron fires. Raises HotsplitError like
    Profile.load, and without a path for a model of which that is not known."""
    if path is not None:
        return Profile.load(path)
    if computes_every_neuron(model, mode):
        return every_neuron(model)
    if model.spec.has_experts:
        unknown = "which experts its tokens choose is known only from a profile"
        raise HotsplitError(f"{model.path}: {unknown}; give --profile (hotsplit profile)")
    raise HotsplitError(
        f"{model.path}: which neurons of this {model.activation} model fire is known only from a"
        " profile; give --profile (hotsplit profile), or --mode dense, which computes all of them"
    )


def every_neuron(model: ModelFile) -> Profile:
    """The profile of one token, for which every neuron fires; layers with fewer neurons than the
    largest have zeros behind theirs, as counted profiles do."""
    num_layers, most = model.spec.num_layers, model.spec.most_neurons
    number_L1 = np.array(model.spec.num_neurons_L)[:, None]
    histogram_LB = np.zeros((num_layers, NUM_BINS), np.int64)
    histogram_LB[:, -1] = most
    return Profile(
        model_id=model.model_id,
        num_tokens=1,
        threshold_L=tuple(model.threshold_L),
        corpora=(),
        active_count_LF=(np.arange(most) < number_L1).astype(np.int64),
        gate_histogram_LB=histogram_LB,
        num_neurons_L=uneven(model.spec.num_neurons_L),
    )


def by_activation(model: ModelFile) -> Profile:
    """The profile in which as many neurons of a layer fire as its activation leaves
    (`Neurons.most_share`), each as often as any other."""
    share_L1 = np.array([[layer.neurons.most_share] for layer in model.spec.layers])
    base = every_neuron(model)
    return replace(
        base,
        num_tokens=NUM_TOKENS,
        gate_histogram_LB=base.gate_histogram_LB * NUM_TOKENS,
        active_count_LF=np.rint(base.active_count_LF * NUM_TOKENS * share_L1).astype(np.int64),
    )


def assumed_experts(model: ModelFile, exponent: float) -> Profile:
    """A profile of a mixture in which each layer's experts are chosen by Zipf's law, expert 0 most
    often; an exponent of 0 chooses all equally often. Layers of as many experts are alike."""
    layers, num_used = model.spec.layers, model.spec.most_used
    drawn: dict[int, np.ndarray] = {}
    routing_LTK = np.full((len(layers), NUM_TOKENS, num_used), -1, np.int16)
    for index, layer in enumerate(layers):
        if layer.route is not None:
            number = layer.neurons.num_experts
            if number not in drawn:
                drawn[number] = drawn_experts(number, num_used, exponent)
            routing_LTK[index] = drawn[number]
    number = max(layer.neurons.num_experts for layer in layers)
    count_LE = np.stack([np.bincount(id_TK[id_TK >= 0], minlength=number) for id_TK in routing_LTK])
    base = every_neuron(model)
    return replace(
        base,
        num_tokens=NUM_TOKENS,
        active_count_LF=base.active_count_LF * NUM_TOKENS,
        gate_histogram_LB=base.gate_histogram_LB * NUM_TOKENS,
        expert_count_LE=count_LE,
        routing_LTK=routing_LTK,
    )


def drawn_experts(num_experts: int, num_used: int, exponent: float) -> np.ndarray:
    """The experts of NUM_TOKENS tokens, ascending, int16 [T, K]. Systematic sampling (Madow, 1949):
    the shares are laid end to end in a random order, and a token takes the K experts at u, u + 1,
    ... Each block of tokens has an order of its own and evenly spaced u, so that each expert is
    chosen as often as its share says, but for one token of a block."""
    share_E = zipf_shares(num_experts, num_used, exponent)
    random = np.random.default_rng(0)
    blocks = []
    for _ in range(NUM_TOKENS // BLOCK_TOKENS):
        order_E = random.permutation(num_experts)
        end_E = np.cumsum(share_E[order_E])
        start_T = (np.arange(BLOCK_TOKENS) + random.random()) / BLOCK_TOKENS
        place_TK = start_T[:, None] + np.arange(num_used)
        found_TK = np.searchsorted(end_E * (num_used / end_E[-1]), place_TK, side="right")
        blocks.append(np.sort(order_E[found_TK], axis=1))
    return np.concatenate(blocks).astype(np.int16)


def zipf_shares(num_experts: int, num_used: int, exponent: float) -> np.ndarray:
    """The share of the tokens that choose each expert, f64 [E] with the sum K: as rank^-exponent,
    but at most 1, and the rest in the same proportion."""
    weight_E = np.arange(1, num_experts + 1) ** -exponent
    for num_always in range(num_used + 1):
        rest_E = weight_E[num_always:]
        if not len(rest_E):
            break
        factor = (num_used - num_always) / rest_E.sum()
        if factor * rest_E[0] <= 1:
            return np.concatenate([np.ones(num_always), factor * rest_E])
    return np.ones(num_experts)

"""A policy of the neuron cache that swaps at random, regardless of the text."""

import numpy as np
from test_runtime import make_split

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.runtime.neuron_cache.native.library import SWAP
from hotsplit.runtime.neuron_cache.residency import Residency
from hotsplit.runtime.neuron_cache.setup import CacheSetup


class RandomPolicy:
    """Decides on up to `most_rows` random swaps after each step; keeps all bits that it
    observes."""

    def __init__(self, resident_LN, num_neurons, *, most_rows=8, seed=0):
        self.residency = Residency(resident_LN, num_neurons)
        self.most_rows, self.random = most_rows, np.random.default_rng(seed)
        self.layers = np.flatnonzero(self.residency.num_slots_L)
        self.pending = np.zeros(0, SWAP)
        self.shown, self.learned = [], []

    def learn(self, bits_RLW):
        self.learned.append(bits_RLW.copy())

    def step(self, bits_RLW):
        self.shown.append(bits_RLW.copy())
        self.residency.swap(self.pending)
        found = []
        for layer in self.random.choice(
            self.layers, self.random.integers(1, len(self.layers) + 1), False
        ):
            cold = self.residency.cold(layer)
            num_slots = self.residency.num_slots_L[layer]
            most = min(len(cold), num_slots, self.most_rows - len(found))
            count = self.random.integers(0, most + 1)
            slots = self.random.choice(num_slots, count, replace=False)
            comes = self.random.choice(cold, count, replace=False)
            goes = self.residency.id_N(layer)[slots]
            found += [(layer, *row, 0.0) for row in zip(slots, comes, goes, strict=True)]
        self.pending = np.array(found, SWAP)
        return self.pending


def divided(path, share=0.5, num_sequences=1):
    """A plan beside the model; this share of each layer's neurons is hot."""
    model = ModelFile.load(path)
    hot = [range(round(share * layer.neurons.number)) for layer in model.spec.layers]
    context_length, split = model.spec.context_length, path.with_name("divided.gguf")
    made = make_split(model, hot, context_length=context_length, num_sequences=num_sequences)
    made.save(split)
    return split


def random_setup(**options):
    """A setup with a RandomPolicy. Options: `most_rows`, `seed`, and those of CacheSetup."""
    most_rows, seed = options.pop("most_rows", 8), options.pop("seed", 0)

    def policy_of(resident_LN, num_neurons):
        return RandomPolicy(resident_LN, num_neurons, most_rows=most_rows, seed=seed)

    return CacheSetup(policy_of=policy_of, most_rows=most_rows, **options)

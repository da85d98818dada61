"""A policy of the neuron cache that swaps at random, regardless of the text."""

import numpy as np

from hotsplit.runtime.neuron_cache.cache_slots import Residency
from hotsplit.runtime.neuron_cache.native.policy_library import SWAP
from hotsplit.runtime.neuron_cache.setup import CacheSetup


class RandomPolicy:
    """Decides on up to `most_rows` random swaps after each step; keeps all bits that it
    observes."""

    def __init__(self, resident_LN, num_neurons, *, most_rows=8, seed=0):
        self.residency = Residency(resident_LN, num_neurons)
        self.most_rows, self.random = most_rows, np.random.default_rng(seed)
        self.layers = np.flatnonzero(self.residency.num_slots_L)
        self.pending = np.zeros(0, SWAP)
        self.shown = []

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


def random_setup(*, most_rows=8, seed=0):
    """A setup with a RandomPolicy."""

    def policy_of(resident_LN, num_units):
        return RandomPolicy(resident_LN, num_units, most_rows=most_rows, seed=seed)

    return CacheSetup(policy_of=policy_of, most_rows=most_rows)

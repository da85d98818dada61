"""What a plan has placed, by unit: for its picture, its page of words and the report.

Letters: L layers, F neurons or experts, R columns of ranks."""

from dataclasses import dataclass

import numpy as np

from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split

NUM_COLUMNS = 200  # maximum columns of ranks


@dataclass(frozen=True, kw_only=True)
class Units:
    """What a plan places, by layer: neurons and how often they fired, or the experts of a mixture
    and how often they were chosen. `hot`: the ids of those on a GPU."""

    name: str
    events: str
    count_LF: np.ndarray
    hot: tuple[np.ndarray, ...]


def units_of(split: Split, profile: Profile) -> Units:
    """The units of a plan; a layer without experts counts as equal parts on one side."""
    if not split.num_experts:
        return Units(
            name="neurons", events="firings", count_LF=profile.active_count_LF, hot=split.hot
        )
    assert profile.expert_count_LE is not None
    count_LE = profile.expert_count_LE.copy()
    is_dense_L = count_LE.sum(axis=1) == 0
    count_LE[is_dense_L] = profile.num_tokens
    hot = tuple(
        np.arange(split.num_experts if len(ids) else 0) if is_dense else ids
        for ids, is_dense in zip(split.hot, is_dense_L.tolist(), strict=True)
    )
    return Units(name="experts", events="choices", count_LF=count_LE, hot=hot)


def firings_on_gpu(split: Split, profile: Profile) -> np.ndarray:
    """Share of a layer's firings that come from hot neurons, or of its choices that are of hot
    experts, f64 [L]; 0 if nothing fires."""
    units = units_of(split, profile)
    pairs = zip(units.count_LF, units.hot, strict=True)
    hot_L = np.array([row_F[ids].sum() for row_F, ids in pairs])
    return hot_L / np.maximum(1, units.count_LF.sum(axis=1))


def device_of_ranks(split: Split, profile: Profile) -> np.ndarray:
    """The device of most units in each column of ranks, int [L, R]: 0 the CPU, k + 1 GPU k."""
    units = units_of(split, profile)
    num_layers, num_neurons = units.count_LF.shape
    num_columns = min(NUM_COLUMNS, num_neurons)
    column_F = np.arange(num_neurons) * num_columns // num_neurons
    sizes_R = np.bincount(column_F)
    device_LR = np.zeros((num_layers, num_columns), np.int64)
    for layer, ids in enumerate(units.hot):
        order_F = np.argsort(-units.count_LF[layer], kind="stable")
        rank_F = np.empty(num_neurons, np.int64)
        rank_F[order_F] = np.arange(num_neurons)
        hot_R = np.bincount(column_F[rank_F[ids]], minlength=num_columns)
        home = split.home[layer] if split.home else 0
        device_LR[layer] = np.where(2 * hot_R >= sizes_R, home + 1, 0) * (hot_R > 0)
    return device_LR

"""Writes a plan as SparkInfer's model-split (`--sparkinfer-model-split`).

It is a plain GGUF with the keys `ffn_group_size` (i32) and `ffn_normalized_pattern` (f32 [L], each
layer's share of the neurons that fit; the sum is 1), and for each layer `blk.N.ffn_reorder_perms`
(i32 [F], permutation[new] = old). Groups of consecutive neurons in the new order are cached, the
first ones first. Sources: SparkInfer, src/llama-sparkinfer.cpp; Kairox, src/llama-kairox.cpp. The
loader looks up a destination for every tensor in the file, so there must be no others.

Letters: L layers, F neurons of a layer, H hot ones."""

from pathlib import Path

import numpy as np

from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import Value, array_entry, write_gguf

ARCHITECTURE = "sparkinfer-model-split"  # the loader does not read it
MAX_GROUPS = 1024  # asserted by the loader
DEFAULT_GROUP_SIZE = 16


def write_model_split(split: Split, profile: Profile, group_size: int, path: Path) -> int:
    """Writes the plan in groups of `group_size` neurons; returns the file's size in bytes."""
    keys: dict[str, Value] = {
        "ffn_group_size": np.int32(group_size),
        "ffn_normalized_pattern": hot_pattern(split).tolist(),
    }
    tensors = {
        f"blk.{layer}.ffn_reorder_perms": array_entry(hot_to_cold(ids_H, count_F), "i32")
        for layer, (ids_H, count_F) in enumerate(
            zip(split.hot, profile.active_count_LF, strict=True)
        )
    }
    write_gguf(path, ARCHITECTURE, keys, tensors)
    return path.stat().st_size


def hot_pattern(split: Split) -> np.ndarray:
    """Each layer's share of the hot neurons, f64 [L]. Raises HotsplitError if no neuron is hot:
    every share would be 0/0."""
    num_hot_L = np.array([len(ids) for ids in split.hot])
    if not num_hot_L.any():
        raise HotsplitError(
            "no neuron of this plan is on the GPU, so a layer's share of them is 0 of 0;"
            " run hotsplit solve with a larger --vram-budget"
        )
    return num_hot_L / num_hot_L.sum()


def hot_to_cold(ids_H: np.ndarray, count_F: np.ndarray) -> np.ndarray:
    """Every neuron once, i32 [F]: hot ones in the plan's order, then others by count, then id."""
    is_cold_F = np.ones(len(count_F), bool)
    is_cold_F[ids_H] = False
    cold = np.flatnonzero(is_cold_F)
    cold = cold[np.argsort(-count_F[cold], kind="stable")]
    return np.concatenate([ids_H, cold]).astype(np.int32)


def group_size_of(num_neurons: int, path: Path) -> int:
    """Neurons of a group, by the number of groups at the end of the file's name. Raises
    HotsplitError for another name, and for groups that SparkInfer refuses."""
    stem, dash, number = path.stem.rpartition("-")
    is_number = bool(dash) and number.isascii() and number.isdigit()
    count = int(number[:9]) if is_number else 0
    if path.suffix == ".gguf" and 0 < count <= MAX_GROUPS and num_neurons % count == 0:
        return num_neurons // count
    fitting = [n for n in range(1, min(num_neurons, MAX_GROUPS) + 1) if num_neurons % n == 0]
    nearest = min(fitting, key=lambda n: abs(num_neurons // n - DEFAULT_GROUP_SIZE))
    name = f"{stem if is_number else path.stem}-{nearest}.gguf"
    raise HotsplitError(
        f"{path}: SparkInfer's file names end in the number of groups, at most {MAX_GROUPS}, into"
        f" which {num_neurons} neurons a layer are divided; use {path.with_name(name)}"
    )


def model_split_notes(split: Split, on_cpu: str, group_size: int) -> list[str]:
    """Notes on what the file cannot express, and on what SparkInfer does with it. `on_cpu`
    describes what dense blocks the plan keeps on the CPU, "" for none."""
    notes = [
        "SparkInfer reads the order only with SPIF_PARALLEL, SPIF_RELOAD and SPIF_REORDER set,"
        " and works out how many neurons fit from its own --vram-budget"
    ]
    num_hot = [len(ids) for ids in split.hot]
    uneven = sum(count % group_size != 0 for count in num_hot)
    if uneven:
        notes.append(
            f"in {uneven} of {len(num_hot)} layers the hot neurons are not whole groups of"
            f" {group_size}: the group at the border is cached with its cold neurons or not at all"
        )
    if 0 in num_hot:
        notes.append(
            f"in {num_hot.count(0)} of {len(num_hot)} layers no neuron is hot, so the share is 0:"
            " SparkInfer gives such layers what is left over"
        )
    if on_cpu:
        notes.append(
            f"the plan keeps {on_cpu} on the CPU, which the file cannot express: place them with"
            " SparkInfer's own flags"
        )
    return notes

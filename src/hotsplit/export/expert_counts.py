"""Writes how often the experts of a mixture were chosen, in the files by which other engines place
them.

    eplb            JSON: {"logical_count": [[count of each expert] of each layer]}. SGLang takes it
                    with --init-expert-location, and its balancer (EPLB) makes of it which GPU has
                    which experts, and which of them twice (SGLang, srt/eplb/expert_location.py)
    ktransformers   torch's .pt with {"logical_count": i64 [1, L, E]}. KTransformers takes it with
                    --init-expert-location and --kt-expert-placement-strategy frequency, and has the
                    most chosen of all layers on the GPU (kt_ep_wrapper.py, experts_base.py)

Layers without experts have zeros, since both count all layers. KTransformers chooses by f32, in
which whole numbers to 2^24 differ: the experts of a plan get HOT more than others, whose counts are
made smaller than that, so that as many as are in the plan are those of the plan.

Letters: L layers, E experts of a layer."""

import json
from pathlib import Path

import numpy as np

from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import partial_file

HOT = 1 << 23


def counts_of(profile: Profile, path: Path) -> np.ndarray:
    """i64 [L, E]. Raises HotsplitError for a profile of a dense model."""
    if profile.expert_count_LE is None:
        raise HotsplitError(
            f"{path}: the profile of a model without experts; wanted one of a mixture"
        )
    return profile.expert_count_LE.astype(np.int64)


def of_plan(count_LE: np.ndarray, split: Split) -> np.ndarray:
    """Counts by which KTransformers chooses the experts that the plan has on its GPUs."""
    most = max(int(count_LE.max()), 1)
    score_LE = count_LE if most < HOT else count_LE * (HOT - 1) // most
    score_LE = score_LE.copy()
    for layer, ids in enumerate(split.hot):
        if count_LE[layer].any():
            score_LE[layer, ids] += HOT
    return score_LE


def write_eplb(count_LE: np.ndarray, path: Path) -> int:
    """Returns the file's size in bytes."""
    text = json.dumps({"logical_count": count_LE.tolist()}) + "\n"
    with partial_file(path) as partial:
        partial.write_text(text)
    return path.stat().st_size


def write_ktransformers(count_LE: np.ndarray, path: Path) -> int:
    """Returns the file's size in bytes."""
    import torch

    with partial_file(path) as partial:
        torch.save({"logical_count": torch.from_numpy(count_LE)[None].clone()}, partial)
    return path.stat().st_size


def num_hot(count_LE: np.ndarray, split: Split) -> int:
    """Experts on the GPUs of a plan."""
    return sum(len(ids) for ids, count_E in zip(split.hot, count_LE, strict=True) if count_E.any())


def ratio_note(count: int, total: int) -> str:
    """The option by which KTransformers takes `count` of `total` experts; it rounds down."""
    ratio = (count + 0.5) / total if count < total else 1
    return (
        f"for the {count:,} of {total:,} experts that the plan has on its GPUs:"
        f" --kt-expert-placement-strategy frequency --kt-gpu-experts-ratio {ratio:.9f}"
    )

"""A profile from the choices of a mixture's routers that another engine recorded, so that a model
of any size is profiled where it runs and planned here.

vLLM returns them with --enable-return-routed-experts: `prompt_routed_experts` of a response and
`routed_experts` of each choice, expert ids [tokens, layers, experts of a token] (vLLM,
docs/training/routed_experts.md); offline, `RequestOutput` has them as arrays. SGLang's decoded
`routed_experts` have the same shape. A layer's place is among all layers, or among those that have
experts.

Which neurons of a chosen expert fire is not in them: all are counted as firing, which is what SiLU
and GELU do.

Letters: T tokens, L layers, R layers of a record, K experts of a token, E experts."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import MAX_RECORDED, NUM_BINS, Corpus, Profile, uneven
from hotsplit.errors import HotsplitError
from hotsplit.files.outputs import check_output
from hotsplit.files.typed import shown

WANTED = (
    "wanted .npy or .npz with expert ids [tokens, layers, experts of a token], or .jsonl of vLLM's"
    " responses (--enable-return-routed-experts)"
)


@dataclass(frozen=True, kw_only=True)
class RoutesReport:
    output: Path
    model_id: str
    num_tokens: int
    hottest_fifth_of_experts_L: tuple[float, ...]  # share of the choices


def profile_routes(path: Path, model_path: Path, output: Path, *, force: bool) -> RoutesReport:
    """Writes the profile of recorded choices. Raises HotsplitError for a model without experts, and
    for a file that is none or of another model."""
    check_output(output, force=force, inputs=[path, model_path])
    model = ModelFile.load(model_path)
    if not model.spec.has_experts:
        raise HotsplitError(f"{model_path}: has no experts, so there are no choices to count")
    found = counted(model, path)
    found.save(output)
    shares = found.hottest_fifth_of_experts_L()
    assert shares is not None
    return RoutesReport(
        output=output,
        model_id=model.model_id,
        num_tokens=found.num_tokens,
        hottest_fifth_of_experts_L=tuple(shares.tolist()),
    )


def counted(model: ModelFile, path: Path) -> Profile:
    layers = model.spec.layers
    most = max(layer.neurons.num_experts for layer in layers)
    count_LE = np.zeros((len(layers), most), np.int64)
    recorded, num_tokens, num_recorded = list[np.ndarray](), 0, 0
    for number, id_TRK in enumerate(_records(path), 1):
        id_LTK = _of_layers(model, id_TRK, f"{path}: record {number}")
        num_tokens += id_LTK.shape[1]
        for layer, count_E in enumerate(count_LE):
            own_TK = id_LTK[layer]
            count_E += np.bincount(own_TK[own_TK >= 0], minlength=most)
        if num_recorded < MAX_RECORDED:
            recorded.append(id_LTK[:, : MAX_RECORDED - num_recorded])
            num_recorded += recorded[-1].shape[1]
    if not num_tokens:
        raise HotsplitError(f"{path}: no tokens; {WANTED}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    count_LF, histogram_LB = _firings(model, count_LE, num_tokens)
    return Profile(
        model_id=model.model_id,
        num_tokens=num_tokens,
        threshold_L=tuple(model.threshold_L),
        corpora=(Corpus(name=path.name, sha256=digest, num_tokens=num_tokens),),
        expert_count_LE=count_LE,
        routing_LTK=np.concatenate(recorded, axis=1),
        num_neurons_L=uneven(model.spec.num_neurons_L),
        active_count_LF=count_LF,
        gate_histogram_LB=histogram_LB,
    )


def _firings(
    model: ModelFile, count_LE: np.ndarray, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Counts [L, F], and histograms, if all neurons of a chosen expert fire and all of others."""
    most, layers = model.spec.most_neurons, model.spec.layers
    count_LF = np.zeros((len(layers), most), np.int64)
    for layer, (spec, count_E) in enumerate(zip(layers, count_LE, strict=True)):
        number = spec.neurons.num_experts
        own = count_E[:number] if number > 1 else np.array([num_tokens])
        fired_F = np.repeat(own, spec.neurons.number // len(own))
        count_LF[layer, : len(fired_F)] = fired_F
    histogram_LB = np.zeros((len(layers), NUM_BINS), np.int64)
    histogram_LB[:, -1] = count_LF.sum(axis=1)
    histogram_LB[:, 0] = num_tokens * most - histogram_LB[:, -1]
    return count_LF, histogram_LB


def _records(path: Path) -> Iterator[np.ndarray]:
    """The arrays of a file. Raises HotsplitError if it cannot be read as one."""
    try:
        if path.suffix == ".npy":
            yield np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                for name in arrays.files:
                    yield arrays[name]
        elif path.suffix == ".jsonl":
            yield from _responses(path)
        else:
            raise HotsplitError(f"{path}: {WANTED}")
    except OSError as error:
        raise HotsplitError(f"{path}: {error.strerror or error}; {WANTED}") from error
    except (BadZipFile, ValueError, EOFError) as error:
        # numpy takes a file that is no array for a pickle, and advises to run it.
        reason = "no array of numpy's" if "pickle" in str(error) else str(error)[:200]
        raise HotsplitError(f"{path}: cannot be read ({reason}); {WANTED}") from error


def _responses(path: Path) -> Iterator[np.ndarray]:
    """The experts chosen in each response: by its prompt, then by each of its texts."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            found = json.loads(line)
            choices = found.get("choices") if isinstance(found, dict) else None
            if not isinstance(choices, list):
                raise HotsplitError(f"{path}: line {number} is no response; {WANTED}")
            texts = [found.get("prompt_routed_experts")]
            texts += [each.get("routed_experts") for each in choices if isinstance(each, dict)]
            texts = [text for text in texts if text]
            if not texts:
                raise HotsplitError(
                    f"{path}: line {number} has no routed_experts: start vLLM with"
                    " --enable-return-routed-experts"
                )
            yield from map(np.array, texts)


def _of_layers(model: ModelFile, id_TRK: np.ndarray, what: str) -> np.ndarray:
    """The choices of each layer, int16 [L, T, K], ascending; -1 in layers without experts."""
    layers, most_used = model.spec.layers, model.spec.most_used
    mixed = [n for n, layer in enumerate(layers) if layer.route is not None]
    if id_TRK.ndim != 3 or id_TRK.dtype.kind not in "iu":
        raise HotsplitError(f"{what} is {id_TRK.dtype} {list(id_TRK.shape)}; {WANTED}")
    num_tokens, num_layers, num_used = id_TRK.shape
    if num_layers not in (len(layers), len(mixed)) or num_used != most_used:
        raise HotsplitError(
            f"{what} has {num_layers} layers and {num_used} experts a token; {model.path} has"
            f" {len(layers)} layers, {len(mixed)} with experts, and chooses {most_used}: of another"
            " model?"
        )
    id_LTK = np.full((len(layers), num_tokens, most_used), -1, np.int16)
    for place, layer in enumerate(mixed):
        own_TK = id_TRK[:, layer if num_layers == len(layers) else place]
        number = layers[layer].neurons.num_experts
        if num_tokens and not (own_TK.min() >= 0 and own_TK.max() < number):
            wrong = own_TK.max() if own_TK.max() >= number else own_TK.min()
            raise HotsplitError(
                f"{what}: expert {shown(int(wrong))} in layer {layer}, which has {number}"
            )
        id_LTK[layer] = np.sort(own_TK, axis=1)
        if (id_LTK[layer, :, 1:] == id_LTK[layer, :, :-1]).any():
            raise HotsplitError(f"{what}: a token of layer {layer} names an expert twice")
    return id_LTK

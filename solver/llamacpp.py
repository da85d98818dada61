"""The options of llama.cpp that come closest to a plan: of all that they can express within the
same budget, the fastest by this machine's figures and `llamacpp_speed`.

    -ngl n             the output matrix, then the last n - 1 layers, whole
    --n-cpu-moe n      all but the experts of the first n layers
    -ot pattern=CPU    all but single tensors: of each layer any of the matrices of its neurons or
                       of its experts, which are whole or not there; no option divides a matrix

Each matrix on the GPU saves the seconds that the CPU would take longer for what a token reads of
it, and a layer without any on the CPU its hand-over; the best choice is a knapsack. Its sizes are
rounded up to a STEPS-th of the room, so that a plan may be that much better.

-ngl counts the output matrix first since 2025, then the layers that predict tokens further ahead
(MTP), although they are not loaded (llama.cpp, src/llama-model.cpp); `layer_split` keeps the older
rule, by which the output matrix comes last. Names are those of files in llama.cpp's layout, which
may join the gates and ups of experts in one matrix.

Letters: L layers, O choices of a layer, R room in steps."""

import shlex
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from hotsplit.costs.part_bytes import head_bytes, is_dense, is_expert, is_predictor, read_share
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.layer_split import cpu_moe, kept_bytes, on_gpu_seconds, split_seconds
from hotsplit.solver.llamacpp_speed import HAND_OVER_S, cpu_rate, gpu_rate

ALL = "999"  # -ngl: more layers than any model has
STEPS = 8192
WORTH_IT = 0.01  # of the time: what a longer command line must save


@dataclass(frozen=True, kw_only=True)
class Told:
    """Arguments for llama.cpp, what they do in words, and the predicted seconds of a token."""

    arguments: tuple[str, ...]
    words: str
    seconds: float

    @property
    def line(self) -> str:
        return shlex.join(self.arguments)


def ways(inputs: Inputs) -> list[Told]:
    """What llama.cpp can be told for this budget, best first; a shorter command line comes before a
    longer one that is not faster by WORTH_IT. For one GPU; several are in `llamacpp_hosts`."""
    assert len(inputs.budgets) == 1, inputs.budgets
    found = [_layers(inputs)]
    if (moe := cpu_moe(inputs)) is not None and moe[0]:
        arguments = ("-ngl", ALL, "--n-cpu-moe", str(moe[0]))
        words = f"all but the experts of {moe[0]} layers on the GPU"
        found.append(Told(arguments=arguments, words=words, seconds=moe[1]))
    if (tensors := _tensors(inputs)) is not None and "-ot" in tensors.arguments:
        found.append(tensors)
    best = found[0]
    for other in found[1:]:
        if other.seconds < best.seconds * (1 - WORTH_IT):
            best = other
    return [best, *sorted((w for w in found if w is not best), key=lambda way: way.seconds)]


def _layers(inputs: Inputs) -> Told:
    model, num_layers = inputs.model, inputs.model.spec.num_layers
    room = max(inputs.budgets) - inputs.workspace - head_bytes(model)
    first = num_layers
    while first and room >= kept_bytes(inputs, first - 1):
        first -= 1
        room -= kept_bytes(inputs, first)
    has_head = room >= 0
    homes = [0] * (num_layers - first + 1) if has_head else []
    seconds = split_seconds(inputs, first, homes, has_head)
    words = f"the head and {num_layers - first} of {num_layers} layers on the GPU"
    words = words if homes else "all on the CPU"
    ahead = model.num_skipped + (model.spec.draft is not None)  # layers, to llama.cpp
    count = len(homes) + (ahead if homes else 0)
    return Told(arguments=("-ngl", str(count)), words=words, seconds=seconds)


@dataclass(frozen=True)
class _Matrix:
    """Matrices of one name in a layer: bytes, and what a token takes longer on the CPU."""

    name: str
    num_bytes: int
    saved_s: float


def _matrices(inputs: Inputs, layer: int) -> list[_Matrix]:
    model, gpu_s = inputs.model, 1 / gpu_rate(inputs.gpus[0])
    found: dict[str, _Matrix] = {}
    for name, entry in model.layer_tensors[layer].items():
        is_moved = is_expert(name) if model.spec.has_experts else not is_dense(name)
        if not is_moved or is_predictor(name):
            continue
        read = read_share(model, layer, name) * entry.num_bytes
        saved_s = read / cpu_rate(inputs.machine, entry.kind) - read * gpu_s
        own = name if entry.part_of is None else entry.part_of.removeprefix(f"blk.{layer}.")
        base = own.split(".")[0].removesuffix("_t")
        old = found.get(base, _Matrix(base, 0, 0.0))
        found[base] = _Matrix(base, old.num_bytes + entry.num_bytes, old.saved_s + saved_s)
    return list(found.values())


def _tensors(inputs: Inputs) -> Told | None:
    """Everything on the GPU but single matrices of layers; None if that cannot fit."""
    num_layers = inputs.model.spec.num_layers
    of_layers = [_matrices(inputs, layer) for layer in range(num_layers)]
    room = max(inputs.budgets) - inputs.workspace - head_bytes(inputs.model)
    room -= sum(kept_bytes(inputs, n) for n in range(num_layers))
    room += sum(m.num_bytes for matrices in of_layers for m in matrices)
    if room < 0:
        return None
    there = _knapsack(of_layers, room, HAND_OVER_S)
    cold = [
        [m for m in matrices if m.name not in names]
        for matrices, names in zip(of_layers, there, strict=True)
    ]
    seconds = on_gpu_seconds(inputs) + sum(
        HAND_OVER_S + sum(m.saved_s for m in matrices) for matrices in cold if matrices
    )
    of_names: dict[tuple[str, ...], list[int]] = {}
    for layer, matrices in enumerate(cold):
        if matrices:
            of_names.setdefault(tuple(m.name for m in matrices), []).append(layer)
    patterns = [
        rf"blk\.({'|'.join(map(str, layers))})\.({'|'.join(names)})\.=CPU"
        for names, layers in of_names.items()
    ]
    number = sum(map(len, cold))
    return Told(
        # Joined by commas: of several -ot only the last may count.
        arguments=("-ngl", ALL, *(("-ot", ",".join(patterns)) if patterns else ())),
        words=f"all but {number} matrices of {sum(map(bool, cold))} layers on the GPU",
        seconds=seconds,
    )


def _knapsack(
    of_layers: list[list[_Matrix]], room: int, hand_over_s: float
) -> list[frozenset[str]]:
    """Each layer's names on the GPU that save most; of equal choices the last layers whole."""
    step = max(1, room // STEPS)
    best_R = np.zeros(room // step + 1)
    chosen: list[np.ndarray] = []
    options = [_options(matrices, hand_over_s) for matrices in of_layers]
    for of_layer in options:
        value_OR = np.full((len(of_layer), len(best_R)), -np.inf)
        for number, (_, num_bytes, saved_s) in enumerate(of_layer):
            size = -(-num_bytes // step)
            if size < len(best_R):
                value_OR[number, size:] = best_R[: len(best_R) - size] + saved_s
        chosen.append(value_OR.argmax(axis=0))
        best_R = value_OR.max(axis=0)
    found, at = [], len(best_R) - 1
    for of_layer, choice_R in zip(reversed(options), reversed(chosen), strict=True):
        names, num_bytes, _ = of_layer[choice_R[at]]
        found.append(names)
        at -= -(-num_bytes // step)
    return found[::-1]


def _options(
    matrices: list[_Matrix], hand_over_s: float
) -> list[tuple[frozenset[str], int, float]]:
    found = []
    for count in range(len(matrices) + 1):
        for some in combinations(matrices, count):
            saved_s = sum(m.saved_s for m in some) + hand_over_s * (0 < count == len(matrices))
            names = frozenset(m.name for m in some)
            found.append((names, sum(m.num_bytes for m in some), saved_s))
    return found

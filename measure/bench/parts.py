"""The parts of a step as reported, and how the native step's parts map to them."""

from torch import Tensor

from hotsplit.artifacts.split_file import Split
from hotsplit.runtime.step.step_times import PARTS

PROJECTIONS, CACHE, PREDICTOR, HEAD = "projections", "cache", "predictor", "head"
HOT, COLD, NEURONS, OTHER, OUTSIDE = "hot", "cold", "neurons", "other", "outside"
ORDER = (PROJECTIONS, CACHE, PREDICTOR, HOT, COLD, NEURONS, HEAD, OTHER, OUTSIDE)
MEANINGS = {
    PROJECTIONS: "attention's matrices",
    CACHE: "attention over the cache",
    PREDICTOR: "predictors",
    HOT: "hot neurons",
    COLD: "cold neurons",
    NEURONS: "neurons",
    HEAD: "output head",
    OTHER: "embedding, norms, sums",
    OUTSIDE: "outside the native call",
}
_OF_NATIVE = {
    "inputs": PROJECTIONS,
    "output": PROJECTIONS,
    "attend": CACHE,
    "predictor": PREDICTOR,
    "head": HEAD,
    "other": OTHER,
}


def neuron_parts(plan: Split | None, layer: int) -> dict[str, str]:
    """The part for each of a layer's blocks of neurons; hot neurons, if any, come first."""
    if plan is None:
        return {"neurons": NEURONS}
    if not len(plan.hot[layer]):
        return {"neurons": COLD}
    return {"neurons": HOT, "neurons_2": COLD}


def part_ns(counts_LP2: Tensor, plan: Split | None, wall_ns: int) -> dict[str, int]:
    """Nanoseconds of each part that took any, in ORDER. They sum to `wall_ns`: time that the native
    step does not account for was spent outside it."""
    found = dict.fromkeys(ORDER, 0)
    num_layers = len(counts_LP2) - 1
    of_native = dict(_OF_NATIVE)
    if not counts_LP2[:, PARTS.index("predictor"), 1].any():
        of_native["predictor"] = OTHER  # no predictor: this is only the clock's overhead
    for layer, row in enumerate(counts_LP2[:, :, 0].tolist()):
        names = of_native | (neuron_parts(plan, layer) if layer < num_layers else {})
        for name, ns in zip(PARTS, row, strict=True):
            if ns:
                found[names[name]] += ns
    found[OUTSIDE] = wall_ns - sum(found.values())
    return {part: ns for part, ns in found.items() if ns}

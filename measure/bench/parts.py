"""The parts of a decode step: their time, and the bytes that each reads, by side of the plan.

On the CPU, the step itself counts the weights of attention, predictors and neurons as it runs; keys
and values, the head, norms and biases are computed from shapes. With a GPU everything is
computed from shapes except cold neurons, which the CPU counts; how many rows of hot neurons a
sparse mode reads is unknown.

Letters: L layers, P parts of runtime.step.native_step."""

from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

from hotsplit.artifacts.split_file import Split
from hotsplit.costs import part_bytes
from hotsplit.model.modes import computes_all, runs_predictors
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step.native_step import PARTS

PROJECTIONS, CACHE, PREDICTOR, HEAD = "projections", "cache", "predictor", "head"
HOT, COLD, NEURONS, OTHER, OUTSIDE = "hot", "cold", "neurons", "other", "outside"
ORDER = (PROJECTIONS, CACHE, PREDICTOR, HOT, COLD, NEURONS, HEAD, OTHER, OUTSIDE)
MEANINGS = {
    PROJECTIONS: "attention's matrices",
    CACHE: "attention over the cache",
    PREDICTOR: "predictors, routers",
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
Bytes = dict[tuple[str, str], float]  # per token, by part and role
ROLES = ("gpu", "cpu")


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


@dataclass(frozen=True, kw_only=True)
class CountedSteps:
    """The number, first position and counters of consecutive decode steps."""

    num_steps: int
    start: int
    counts_LP2: Tensor | None  # None unless steps are native
    traffic: Traffic


@dataclass(frozen=True)
class StepBytes:
    """The bytes read for an average token."""

    by_part: Bytes
    unknown: str | None  # the reason, if a part is missing

    @property
    def total(self) -> float | None:
        """Bytes of all parts; None if one is missing."""
        return None if self.unknown else sum(self.by_part.values())

    def of_part(self, part: str) -> float:
        return sum(num_bytes for (name, _), num_bytes in self.by_part.items() if name == part)

    def of_role(self, role: str) -> float | None:
        """Bytes of one side of the plan; None if a part is missing."""
        if self.unknown:
            return None
        return sum(num_bytes for (_, side), num_bytes in self.by_part.items() if side == role)

    @property
    def by_role(self) -> dict[str, float | None]:
        sides = {side for _, side in self.by_part}
        return {role: self.of_role(role) for role in ROLES if role in sides}


@dataclass(frozen=True, kw_only=True)
class StepSides:
    """The sides of the plan that hold each layer's attention, the head and the embedding."""

    layers: tuple[str, ...]
    head: str
    embedding: str

    @classmethod
    def of(cls, engine: Engine, plan: Split | None) -> "StepSides":
        whole = "cpu" if engine.device.type == "cpu" else "gpu"
        if plan is None:
            layers, head = (whole,) * engine.model.spec.num_layers, whole
        else:
            layers = tuple("gpu" if on_gpu else "cpu" for on_gpu in plan.dense_on_gpu)
            head = "gpu" if plan.head_on_gpu else "cpu"
        is_with_head = engine.model.is_tied and not engine.model.spec.first
        return cls(layers=layers, head=head, embedding=head if is_with_head else "cpu")


def bytes_by_part(engine: Engine, plan: Split | None, steps: CountedSteps) -> StepBytes:
    """Average bytes per token of these steps."""
    model, count, traffic = engine.model, steps.num_steps, steps.traffic
    is_by_layer = steps.counts_LP2 is None and engine.device.type == "cpu"
    # Steps that run layer by layer on the CPU count no sides of a plan.
    sides = StepSides.of(engine, None if is_by_layer else plan)
    found: Bytes = defaultdict(float)
    found[HEAD, sides.head] += part_bytes.head_bytes(model)
    found[OTHER, sides.embedding] += model.tensors["token_embd.weight"].row_bytes
    if positions := model.tensors.get("position_embd.weight"):
        found[OTHER, "cpu"] += positions.row_bytes
    if read := part_bytes.outside_read(model):
        found[OTHER, "cpu"] += read
    for layer, side in enumerate(sides.layers):  # norms and biases, not those of predictors
        for name, entry in model.layer_tensors[layer].items():
            if len(entry.shape) == 1 and not part_bytes.is_predictor(name):
                found[OTHER, side] += entry.num_bytes
    unknown = _add_cache(found, engine, sides, steps)
    if steps.counts_LP2 is not None:
        for layer, side in enumerate(sides.layers):
            counted = steps.counts_LP2[layer, :, 1]
            of_part = {name: counted[i].item() / count for i, name in enumerate(PARTS)}
            found[PROJECTIONS, side] += of_part["inputs"] + of_part["output"] + of_part["other"]
            if of_part["predictor"]:
                found[PREDICTOR, side] += of_part["predictor"]
            for name, part in neuron_parts(plan, layer).items():
                found[part, "gpu" if part == HOT else "cpu"] += of_part[name]
    elif is_by_layer:
        found[PROJECTIONS, "cpu"] += traffic.attention / count
        found[NEURONS, "cpu"] += (traffic.gate + traffic.up + traffic.down) / count
        if traffic.predictor:
            found[PREDICTOR, "cpu"] += traffic.predictor / count
    else:
        for layer, side in enumerate(sides.layers):
            for name, entry in model.layer_tensors[layer].items():
                if len(entry.shape) == 2 and part_bytes.is_dense(name):
                    found[PROJECTIONS, side] += entry.num_bytes
                elif part_bytes.is_predictor(name) and runs_predictors(engine.mode):
                    found[PREDICTOR, side] += entry.num_bytes
        unknown = unknown or _add_neurons(found, engine, plan, steps)
    return StepBytes(dict(found), unknown)


def _add_cache(found: Bytes, engine: Engine, sides: StepSides, steps: CountedSteps) -> str | None:
    """Adds the keys and values that tokens attend to; returns the reason if they are unknown."""
    types = engine.cache_types
    last = steps.start + steps.num_steps
    if types.selection is not None and last > types.selection.longest - types.selection.block:
        return "the keys that a token reads with --kv-offload are not counted"
    positions = steps.start + (steps.num_steps + 1) / 2
    for layer, side in enumerate(sides.layers):
        attention = engine.model.spec.layers[layer].attention
        if attention is None:
            found[CACHE, side] += part_bytes.state_bytes(engine.model, layer)
            continue
        read = min(positions, attention.window or positions)
        found[CACHE, side] += read * attention.num_kv_heads * types.row_bytes(attention.head_dim)
    return None


def _add_neurons(
    found: Bytes, engine: Engine, plan: Split | None, steps: CountedSteps
) -> str | None:
    """Adds neurons; returns the reason if the bytes of those on the GPU are unknown."""
    model, num_neurons = engine.model, engine.model.spec.most_neurons
    num_hot = [num_neurons] * len(engine.layers) if plan is None else list(map(len, plan.hot))
    traffic = steps.traffic
    cold = traffic.gate + traffic.up + traffic.down
    if cold:
        found[COLD, "cpu"] += cold / steps.num_steps
    if plan is not None and model.spec.has_experts and any(num_hot):
        return "the experts that a GPU reads are not counted"
    if not computes_all(engine.mode) and any(num_hot):
        return "the rows that a GPU reads in a sparse mode are not counted"
    for layer, count in enumerate(num_hot):
        found[HOT if plan else NEURONS, "gpu"] += (
            count * part_bytes.layer_bytes(model, layer).neuron
        )
    return None

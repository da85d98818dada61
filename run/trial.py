"""The trial of a plan: a few steps and a prompt by the plan, and a few steps on the CPU alone, each
loaded as it would run. What is measured decides, not what was predicted.

What cannot be loaded, and the CPU alone if main memory cannot hold the model, is left out, with the
reason. A plan that is slower than the CPU alone by SLOWER is not run. If a token takes longer than
predicted by MISSED, the machine's figures are scaled so that they explain what was measured
(`scales_of`), and the solver runs once more; that plan and the one by whole layers are tried too.
Of a mixture of experts, whole layers and everything but the experts on the GPUs are tried in any
case. The fastest runs, and one line says why."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from hotsplit.artifacts.trial_file import MISSED, Trial, Winner
from hotsplit.errors import HotsplitError
from hotsplit.files.typed import one_line
from hotsplit.options.engine_config import EngineConfig
from hotsplit.runtime.device.device_memory import out_of_memory_as_error
from hotsplit.runtime.engine import Engine, load_engine
from hotsplit.solver.scales import Scales

WARM_UP, STEPS, PROMPT_TOKENS = 2, 16, 64
SLOWER = 1.05
MOST_SCALE = 100.0


@dataclass(frozen=True, kw_only=True)
class PlanTimes:
    """Median seconds of a token, and those of a prompt of PROMPT_TOKENS or the context."""

    token_s: float
    prompt_s: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted seconds of a token by the plan, with its parts "cpu", "hand_over" and "gpu", on the
    CPU alone, and by the obvious plans."""

    token_s: float
    parts_s: Mapping[str, float]
    cpu_alone_s: float
    obvious_s: Mapping[Winner, float] = field(default_factory=dict)


def measure(engine: Engine) -> PlanTimes:
    """Times single steps and one prompt."""
    times, token_id = list[float](), 0
    with (
        engine.sequence() as text
    ):  # what the model goes on to write, so that its choices of experts vary
        for _ in range(min(WARM_UP + STEPS, engine.context_length)):
            began = perf_counter()
            token_id = int(text.extend([token_id])[0].argmax())
            times.append(perf_counter() - began)
    ids = [token % engine.model.spec.vocab_size for token in range(PROMPT_TOKENS)]
    with engine.sequence() as text:
        began = perf_counter()
        text.extend(ids[: engine.context_length], "last")
        prompt_s = perf_counter() - began
    return PlanTimes(token_s=median(times[WARM_UP:] or times), prompt_s=prompt_s)


def measured_by(model: Path, split: Path | None, config: EngineConfig) -> PlanTimes:
    """Times a model. Raises HotsplitError or MemoryError if it cannot be loaded."""
    with out_of_memory_as_error(), load_engine(model, split, config) as engine:
        return measure(engine)


def scales_of(prediction: Prediction, first: PlanTimes, cpu_s: float | None) -> Scales:
    """The factors of the CPU's figures, of hand-overs and of the GPU's that explain a trial. The
    CPU alone, if it was timed, shows the first factor. What is then left of the plan's seconds is
    laid to its hand-overs, which depend most on the machine, or if it has none, to the GPU."""
    parts = prediction.parts_s
    cpu = 1.0 if cpu_s is None else cpu_s / prediction.cpu_alone_s
    rest_s = first.token_s - cpu * parts["cpu"]
    name, other = ("hand_over", "gpu") if parts["hand_over"] > 0 else ("gpu", "hand_over")
    share = (rest_s - parts[other]) / parts[name] if parts[name] > 0 else 1.0
    scales = {"hand_over": 1.0, "gpu": 1.0, name: min(MOST_SCALE, max(1.0, share))}
    return Scales(cpu=min(MOST_SCALE, max(1 / MOST_SCALE, cpu)), **scales)


def tried(
    prediction: Prediction,
    by: Callable[[Winner], PlanTimes],
    again: Callable[[Scales], float],
    *,
    tries_all: bool,
) -> Trial:
    """Measures the plan and the CPU alone; if the prediction was missed, a second plan, which
    `again` makes by these factors and predicts; then, or if `tries_all`, the obvious ones as well.
    What `by` or `again` refuses is left out. Raises HotsplitError if that is all."""
    found, left_out = dict[Winner, PlanTimes](), dict[Winner, str]()
    predicted: dict[Winner, float] = {
        "the plan": prediction.token_s,
        "the CPU alone": prediction.cpu_alone_s,
    }

    def take(name: Winner, predicted_s: Callable[[], float]) -> None:
        try:
            predicted[name] = predicted_s()
            found[name] = by(name)
        except (HotsplitError, MemoryError) as error:
            left_out[name] = one_line(error) or "out of memory"

    for name in ("the plan", "the CPU alone"):
        take(name, partial(predicted.__getitem__, name))
    first, alone = found.get("the plan"), found.get("the CPU alone")
    cpu_s = None if alone is None else alone.token_s
    scales = Scales() if first is None else scales_of(prediction, first, cpu_s)
    is_missed = first is not None and first.token_s > MISSED * prediction.token_s
    if is_missed:
        take("the second plan", partial(again, scales))
    if is_missed or first is None or tries_all:
        for name in prediction.obvious_s:
            take(name, partial(prediction.obvious_s.__getitem__, name))
    if not found:
        raise HotsplitError(f"nothing that was tried can be loaded: {left_out['the plan']}")
    handicap = {"the CPU alone": SLOWER}
    runs = min(found, key=lambda name: found[name].token_s * handicap.get(name, 1.0))
    return Trial(
        runs=runs,
        predicted_s={name: predicted[name] for name in found},
        left_out=left_out,
        measured_s={name: measured.token_s for name, measured in found.items()},
        prompt_s=(first or found[runs]).prompt_s,
        parts_s=prediction.parts_s,
        scales=asdict(scales),
    )

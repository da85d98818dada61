"""Runs lm-eval's tasks on an engine: `hotsplit eval --tasks`.

lm-eval is an optional dependency (the extra `tasks`). Its requests are computed in
lm_eval_model."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import one_line, shown
from hotsplit.measure.evaluate.config import TasksConfig
from hotsplit.model.modes import Mode
from hotsplit.runtime.engine import Engine, load_engine
from hotsplit.runtime.resolved_options import device_of

NORMAL_95 = 1.96  # half-width of a 95 % interval, in standard errors
NUM_TEXTS = 4  # texts generated together on the CPU without a plan


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of a task. The half-width of its 95 % interval is None if lm-eval gives no
    standard error, or gives zero, which says only that all documents scored alike."""

    task: str
    metric: str
    value: float
    half_width: float | None
    num_documents: int | None


@dataclass(frozen=True, kw_only=True)
class TasksReport:
    model_id: str
    mode: Mode
    limit: int | None
    scores: tuple[Score, ...]

    @property
    def lines(self) -> list[str]:
        told = []
        for score in self.scores:
            half = "" if score.half_width is None else f" ± {score.half_width:.4f}"
            count = "" if score.num_documents is None else f", {score.num_documents:,} documents"
            told.append(f"{self.mode}: {score.task} {score.metric} {score.value:.4f}{half}{count}")
        return [*told, "± is half of the 95 % confidence interval"]


def run_tasks(
    config: TasksConfig, on_requests: Callable[[float], None] = lambda count: None
) -> TasksReport:
    """Runs the tasks. Raises HotsplitError if lm-eval, a task or its data is unavailable, and if
    lm-eval cannot prepare the tasks."""
    lm_eval = _library()
    from hotsplit.measure.evaluate.lm_eval_model import EngineModel  # imports lm_eval

    manager = _manager(config)
    is_plain = config.split is None and device_of(config.engine.device).type == "cpu"
    num_texts = NUM_TEXTS if is_plain else 1
    with _load(config, num_texts) as engine:
        model = EngineModel(engine, num_texts=num_texts, seed=config.seed, on_requests=on_requests)
        try:
            found = lm_eval.simple_evaluate(
                model=model, tasks=list(config.tasks), num_fewshot=config.num_fewshot,
                limit=config.limit, task_manager=manager, log_samples=False, bootstrap_iters=1000,
                random_seed=config.seed, numpy_random_seed=config.seed,
                torch_random_seed=config.seed, fewshot_random_seed=config.seed,
            )  # fmt: skip
        except OSError as error:
            if model.is_asked:
                raise
            raise HotsplitError(
                f"tasks {', '.join(config.tasks)}: their data is unavailable"
                f" ({one_line(error)}); the first run downloads it from the hub and needs a network"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
            if model.is_asked:
                raise
            raise HotsplitError(
                f"tasks {', '.join(config.tasks)}: lm-eval cannot prepare them"
                f" ({type(error).__name__}: {one_line(error)}); see the task's own requirements"
            ) from error
        return TasksReport(
            model_id=engine.model.model_id,
            mode=engine.mode,
            limit=config.limit,
            scores=_scores(found),
        )


def _library() -> Any:
    try:
        import lm_eval
    except ImportError as error:
        raise HotsplitError(
            f"tasks need lm-eval ({one_line(error)}): pip install lm-eval"
        ) from error
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return lm_eval


def _manager(config: TasksConfig) -> Any:
    """The task manager. lm-eval's own tasks are thousands of files, which are not read if the given
    folder has all tasks asked for.

    Raises HotsplitError for unknown tasks."""
    from lm_eval.tasks import TaskManager

    if config.folder is not None:
        manager = TaskManager(include_path=str(config.folder), include_defaults=False)
        if set(config.tasks) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=None if config.folder is None else str(config.folder))
    unknown = [name for name in config.tasks if name not in set(manager.all_tasks)]
    if unknown:
        raise HotsplitError(
            f"no task is called {shown(unknown[0])}; lm-eval ls tasks lists them, and --task-folder"
            " adds a folder of your own"
        )
    return manager


def _load(config: TasksConfig, num_texts: int) -> Engine:
    asked = replace(config.engine, num_sequences=num_texts)
    return load_engine(config.model, config.split, asked)


def _scores(found: Any) -> tuple[Score, ...]:
    """The scores of every task and group, in lm-eval's order. A key such as "acc,none" holds the
    metric, and the filter of the answers."""
    counts = found.get("n-samples", {})
    scores = []
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            is_known = isinstance(error, int | float) and error > 0
            scores.append(Score(
                task=task,
                metric=metric if filtered == "none" else f"{metric} ({filtered})",
                value=float(value),
                half_width=NORMAL_95 * float(error) if is_known else None,
                num_documents=counts.get(task, {}).get("effective"),
            ))  # fmt: skip
    return tuple(scores)

"""Makes a dense model sparse: trains it to match the predictions of its dense self with fewer
neurons.

    checkpoint (or model.gguf) + text  ->  a trained checkpoint for each share

The first training windows set the neurons' weights (rule "threshold") and the first limits (rules
"threshold" and "fatrelu"), unless the run starts from a trained checkpoint. Then every step trains
on a batch; under these two rules, the silent share follows the schedule. From time to time the
model is compared with its dense self on held-out text; the best state of every share is written.
On Ctrl-C, SIGTERM and SIGHUP the run finishes its current step, saves its state and ends.

Model files are written by the command line, which calls convert."""

import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Self

from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.errors import HotsplitError, Interrupted
from hotsplit.files.atomic import locked_folder
from hotsplit.profile.corpus.processes import Ranks, rank_here
from hotsplit.profile.count.resume import Position, load_position
from hotsplit.sparsify import state
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.sparsify.limits import Limits
from hotsplit.sparsify.plan import Plan, check_outputs, dense_folder, make_checkpoint, remove_dense
from hotsplit.sparsify.quality import Quality, evaluate
from hotsplit.sparsify.schedule import Schedule
from hotsplit.sparsify.state import Best, Made, Point, Record
from hotsplit.sparsify.student import load_student, matrix_names, whole_matrices
from hotsplit.sparsify.texts import read_texts, up_to
from hotsplit.sparsify.trained_checkpoint import read_trained, write_trained
from hotsplit.sparsify.trainer import NotFinite, Trainer
from hotsplit.system.save_schedule import SaveSchedule
from hotsplit.system.signals import MESSAGE, NUMBERS, SAME_S


class Signals:
    """A context manager. During training the first signal is noted, and a second one ends the
    program at once, unless both came together: shells and `timeout` send a signal twice. With
    several processes, later signals are ignored, since torchrun sends every signal twice. Before
    training, the first one ends the program."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_training, self.num_processes = False, 1
        self._told_at = 0.0  # when the first signal came
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in NUMBERS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_new = self.number is not None and now - self._told_at >= SAME_S
        if not self.is_training or (is_new and self.num_processes == 1):
            raise Interrupted(MESSAGE, number)
        if self.number is None:
            self._told_at = now
        self.number = number

    def train(self, ranks: Ranks) -> None:
        """Lets signals end the run after the current step from now on."""
        self.is_training, self.num_processes = True, ranks.size

    def wants_stop(self, ranks: Ranks) -> bool:
        """True if any process got a signal."""
        return ranks.largest(int(self.number is not None)) > 0

    def interrupted(self, state: Path) -> Interrupted:
        return Interrupted(
            f"interrupted; {state} holds the work so far; the same command continues from there",
            self.number or signal.SIGTERM,
        )


Say = Callable[[str], None]
OnTokens = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class SparsifyReport:
    """`record` has the curve, the finished shares, and the untrained model's quality by share."""

    model_id: str  # of the dense model
    precision: str  # of the products
    num_processes: int
    num_trained: int  # values
    num_tokens: int
    memory: str
    record: Record


class Run:
    """One process's run of the command."""

    def __init__(self, plan: Plan, ranks: Ranks, say: Say, on_tokens: OnTokens) -> None:
        self.plan, self.ranks, self.config = plan, ranks, plan.config
        self.say = say if ranks.is_first else (lambda line: None)
        self.on_tokens = on_tokens
        self.texts = read_texts(plan.config, plan.source)
        self.student = load_student(plan.source, plan.config.rule, plan.dtype, plan.device)
        self.trainer = Trainer(plan.config, self.student, plan.schedule, ranks)
        self.best, self.record = Best(), Record()
        self.losses: list[float] = []  # of the steps since the last point of the curve
        self.saves = SaveSchedule(plan.config.save_every_s)

    def begin(self, position: Position) -> None:
        """Continues from the position of an earlier run; without one, starts from a trained
        checkpoint if one is given, or else sets the first limits."""
        if position.arrays:
            self.best, self.record, self.losses = state.restore(self.trainer, position)
            self._set_first_share()
            self.say(f"continues at step {self.trainer.step:,} of {self.schedule.num_steps:,}")
            return
        if self.config.start_from is not None:
            self._start_from(self.config.start_from)
            return
        self.trainer.measure(self.texts.measured)
        if not self.config.chooses_share:
            return
        for share in self.config.targets:
            self.trainer.set_share(share, self.texts.measured)
            found = self.check(self.config.check_tokens)
            self.record.untrained[f"{share:g}"] = found
            self.say(f"untrained: {found.line}")
        self.trainer.set_share(self.schedule.share(0), self.texts.measured)

    def _start_from(self, folder: Path) -> None:
        """Starts from the weights and limits of a trained checkpoint, and from the share that they
        silence."""
        names = matrix_names(self.student.layers)
        matrices, limit_LF = read_trained(folder, names)
        shapes = [matrix.shape for layer in self.student.layers for matrix in layer.dense]
        if [matrices[name].shape for name in names] != shapes:
            raise HotsplitError(f"{folder}: its matrices have other sizes than the model's")
        self.trainer.start_from(matrices, Limits.from_limits(limit_LF, self.config.allocation))
        self.record.started = self.check(self.config.check_tokens)
        self._set_first_share()
        self.say(f"from {folder}: {self.record.started.line}")

    def _set_first_share(self) -> None:
        """After a start from a trained checkpoint, the schedule begins at the share it silences."""
        if self.record.started is not None:
            share = self.record.started.silent_share
            self.trainer.schedule = replace(self.trainer.schedule, first_share=share)

    @property
    def schedule(self) -> Schedule:
        return self.trainer.schedule

    def check(self, max_tokens: int, name: str | None = None) -> Quality:
        """The current quality, on the first windows of a held-out text."""
        windows = up_to(self.texts.held_out[name or next(iter(self.texts.held_out))], max_tokens)
        return evaluate(self.student, windows, self.ranks)

    def train(self, signals: Signals) -> None:
        """Runs all remaining steps. After a signal, saves the state and raises Interrupted."""
        size, schedule = self.config.batch_tokens // self.config.window, self.schedule
        windows = islice(self.texts.training, self.trainer.step * size * self.ranks.size, None)
        self.on_tokens(self.trainer.step * self.plan.step_tokens)
        every = max(1, schedule.steps_of_share // self.config.checks)
        while self.trainer.step < schedule.num_steps:
            batch = list(islice(windows, size * self.ranks.size))
            self.losses.append(self._step(batch[self.ranks.rank * size :][:size]))
            step = self.trainer.step - 1
            if schedule.ends_stage(step) or (step + 1) % every == 0:
                self._note(step, sum(self.losses) / len(self.losses))
                self.losses = []
            if schedule.ends_stage(step):
                self._finish_share(self.config.targets[schedule.stage(step)])
            self._pause(signals, must_save=schedule.ends_stage(step))

    def _step(self, windows: list) -> float:
        began = time.monotonic()
        try:
            kl = self.trainer.train(windows)
        except NotFinite as error:  # in all processes
            self.save()
            if not self.ranks.is_first:
                raise SystemExit(1) from error
            raise HotsplitError(
                f"{error}: a learning rate of {self.config.learning_rate:g} may be too high;"
                f" {self.config.state_path} has the last good state; start over with a lower"
                " --learning-rate and --force"
            ) from error
        self.record.seconds += time.monotonic() - began
        self.on_tokens(self.plan.step_tokens)
        return kl

    def _note(self, step: int, loss: float) -> None:
        """Reports a point of the curve; while the share is held, keeps its best state."""
        quality = self.check(self.config.check_tokens)
        point = Point(
            step=self.trainer.step, tokens=self.trainer.step * self.plan.step_tokens,
            seconds=self.record.seconds, wanted_share=self.schedule.share(step),
            trained_kl=loss, quality=quality,
        )  # fmt: skip
        self.record.curve.append(point)
        if self.schedule.is_held(step):
            self.best.offer(quality.kl, self.trainer)
        self.say(
            f"step {point.step:,} of {self.schedule.num_steps:,}, {point.tokens:,} tokens,"
            f" {point.seconds:,.0f} s, KL in training {loss:.4f}: {quality.line}"
        )

    def _finish_share(self, share: float) -> None:
        """Writes the checkpoint of the best state; training continues from the last state."""
        last = state.copied(state.model_arrays(self.trainer))
        state.load_model_arrays(self.trainer, self.best.arrays)
        found = {n: self.check(self.config.held_out_tokens, n) for n in self.texts.held_out}
        folder = self.config.checkpoint_of(share)
        self.ranks.first_only(lambda: self._write(folder))
        for name, quality in found.items():
            self.say(f"best, of step {self.best.step:,}, on {name}: {quality.line}")
        self.record.made.append(
            Made(share=share, checkpoint=folder, best_step=self.best.step, quality=found)
        )
        state.load_model_arrays(self.trainer, last)
        self.best = Best()

    def _write(self, folder: Path) -> None:
        limit_LF = self.trainer.limits.limit_LF.numpy()
        source = Checkpoint.open(self.plan.source).read
        matrices = dict(whole_matrices(self.student.layers, source))
        write_trained(self.plan.source, folder, matrices, limit_LF, self.config.rule)

    def _pause(self, signals: Signals, must_save: bool) -> None:
        """Saves if a save is due or `must_save`; after a signal, saves and raises Interrupted. All
        processes do so at the same step."""
        is_stop = signals.wants_stop(self.ranks)
        if (
            is_stop
            or must_save
            or self.ranks.largest(int(self.saves.is_due and self.ranks.is_first))
        ):
            self.save()
        if is_stop:
            raise signals.interrupted(self.config.state_path)

    def save(self) -> None:
        """Saves the position of the run; the first process writes the file."""
        with self.saves.save():
            self.ranks.first_only(
                lambda: state.save(
                    self.config.state_path,
                    self.plan.settings,
                    state.position_of(self.trainer, self.best, self.record, self.losses),
                )
            )

    def report(self) -> SparsifyReport:
        return SparsifyReport(
            model_id=self.plan.model_id,
            precision=str(self.student.dtype).removeprefix("torch."),
            num_processes=self.ranks.size,
            num_trained=sum(p.numel() for p in self.trainer.parameters.values()),
            num_tokens=self.trainer.step * self.plan.step_tokens,
            memory=self.plan.memory,
            record=self.record,
        )


def sparsify(
    config: SparsifyConfig, say: Say = lambda line: None, on_tokens: OnTokens = lambda count: None
) -> SparsifyReport:
    """Trains, and writes a checkpoint for every share. The caller removes the work files with
    `plan.finish`.

    Raises HotsplitError for a model that cannot be trained, and while another run with this
    output is at work. A signal during training saves the state and raises Interrupted; one before
    it raises Interrupted at once."""
    with locked_folder(config.work_folder) if rank_here() == 0 else nullcontext():
        return sparsify_locked(config, say, on_tokens)


def sparsify_locked(config: SparsifyConfig, say: Say, on_tokens: OnTokens) -> SparsifyReport:
    """Does what `sparsify` does; the caller holds the lock of the work folder."""
    with Ranks() as ranks, Signals() as signals:
        ranks.first_only(lambda: check_outputs(config))
        makes_dense = ranks.is_first and not dense_folder(config).exists()
        try:
            ranks.first_only(lambda: make_checkpoint(config))
            plan = ranks.together(lambda: Plan.of(config, ranks))
            if ranks.is_first:
                say(f"training {plan.memory}")
                for note in plan.notes:
                    say(f"note: {note}")
            position = load_position(config.state_path, plan.settings, ranks, force=config.force)
            run = ranks.together(lambda: Run(plan, ranks, say, on_tokens))
            run.begin(position)
            signals.train(ranks)
            run.train(signals)
        except BaseException:
            if makes_dense and not config.state_path.exists():  # there is nothing to continue from
                remove_dense(config)
            raise
        return run.report()

"""Plans a run before its model is loaded: checks its source, sizes, memory, disk and outputs. Also
removes its work files afterwards."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.convert.convert import draft_of
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.families.table import read_blueprint
from hotsplit.files.atomic import remove_stale
from hotsplit.files.outputs import check_output_folder
from hotsplit.files.outputs import check_outputs as check_files
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.profile.count.resume import Settings
from hotsplit.runtime.kernels.arithmetic import arithmetic
from hotsplit.runtime.resolved_options import device_of
from hotsplit.sparsify.config import TRAINED, SparsifyConfig
from hotsplit.sparsify.needs import (
    check_disk,
    check_memory,
    checkpoint_bytes,
    needs_of,
    num_trained,
)
from hotsplit.sparsify.schedule import ACTIVATION_RAMP, RAMP, Schedule
from hotsplit.sparsify.source import CHECKPOINT_FILES, as_checkpoint
from hotsplit.sparsify.student import dtype_of
from hotsplit.sparsify.trained_checkpoint import is_written

# Options that do not affect the training, or that `Plan.settings` records in another form.
NOT_SETTINGS = ("model", "corpora", "output", "shares", "held_out", "start_from",
                "save_checkpoint", "outtype", "device", "force", "save_every_s")  # fmt: skip
DENSE = "dense"  # in the work folder


@dataclass(frozen=True, kw_only=True)
class Plan:
    config: SparsifyConfig
    source: Path  # the dense checkpoint's folder
    model_id: str
    device: str
    dtype: torch.dtype
    schedule: Schedule
    num_processes: int
    memory: str
    notes: tuple[str, ...]  # of the conversion at the end

    @classmethod
    def of(cls, config: SparsifyConfig, ranks: Ranks) -> "Plan":
        """Plans the run; `make_checkpoint` comes first. Raises HotsplitError for a model that
        convert does not support, for a rank larger than the matrices allow, and if memory or disk
        is too small for the training."""
        source = dense_folder(config)
        # Refuses tensors that are missing, unknown or of other shapes, as the conversion at the end
        # would.
        output = config.work_folder / "model.gguf"
        draft = draft_of(ConvertConfig(source=source, output=output, outtype=config.outtype))
        checkpoint = Checkpoint.open(source)
        plan = read_blueprint(source / "config.json", checkpoint.config, checkpoint.max_rows)
        spec = plan.spec
        largest = min(spec.hidden_size, *(layer.neurons.number for layer in spec.layers))
        if config.rank is not None and config.rank > largest:
            raise HotsplitError(
                f"rank is {config.rank}, wanted at most {largest}, the smaller side of the matrices;"
                " leave --rank out to train whole ones"
            )
        device = str(device_of(ranks.device(config.device)))
        dtype = dtype_of(config.precision, device)
        is_tied = checkpoint.config.get("tie_word_embeddings") is True
        needs = needs_of(spec, config, dtype, is_tied)
        check_disk(
            config,
            num_trained=num_trained(spec, config),
            checkpoint_bytes=checkpoint_bytes(checkpoint, spec.num_layers),
            output_bytes=sum(entry.num_bytes for entry in draft.model.tensors.values()),
        )
        steps = max(1, math.ceil(config.tokens / (config.batch_tokens * ranks.size)))
        return cls(
            config=config,
            source=source,
            model_id=checkpoint.model_id(),
            device=device,
            dtype=dtype,
            schedule=Schedule(
                shares=config.targets, steps_of_share=steps, learning_rate=config.learning_rate,
                warmup_steps=min(config.warmup_steps, steps // 2),
                ramp=RAMP if config.rule == "threshold" else ACTIVATION_RAMP,
            ),
            num_processes=ranks.size,
            memory=check_memory(needs, torch.device(device), ranks.size),
            notes=draft.notes,
        )  # fmt: skip

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, over all processes."""
        return self.config.batch_tokens * self.num_processes

    @property
    def settings(self) -> Settings:
        """Settings that a resumed run must share with the earlier one."""
        values = {k: v for k, v in asdict(self.config).items() if k not in NOT_SETTINGS}
        trained = self.config.start_from
        return values | {
            "model_id": self.model_id,
            "shares": ", ".join(map(str, self.config.targets)),
            "corpora": ", ".join(map(_name_and_size, self.config.corpora)),
            "held_out": ", ".join(map(_name_and_size, self.config.held_out)),
            "start_from": None if trained is None else Checkpoint.open(trained).model_id(),
            "processes": self.num_processes,
            "products": str(self.dtype).removeprefix("torch."),
            "arithmetic": arithmetic(torch.device(self.device)),
            "threads": torch.get_num_threads(),
        }


def check_outputs(config: SparsifyConfig) -> None:
    """Raises HotsplitError for outputs that exist (unless `force`) or cannot be written.
    Checkpoints may exist if the run is resumed, or if they are in the work folder, where a killed
    run leaves them."""
    goes_on = config.state_path.exists()
    read = [config.model, config.start_from, *config.corpora, *config.held_out]
    inputs = [path for path in read if path is not None]
    folders = [path for path in (config.model, config.start_from) if path and path.is_dir()]
    checkpoints = [config.checkpoint_of(share) for share in config.targets]
    check_files(
        [config.output_of(share) for share in config.targets], force=config.force, inputs=inputs,
        folders=folders, output_folders=checkpoints,
    )  # fmt: skip
    kept, source = checkpoints if config.save_checkpoint is not None else [], dense_folder(config)
    check_files([], force=True, inputs=[*inputs, *kept], output_folders=[config.work_folder])
    for folder in checkpoints:
        check_output_folder(
            folder, force=config.force or goes_on or config.save_checkpoint is None,
            is_ours=lambda name: name in CHECKPOINT_FILES or is_written(name, source),
        )  # fmt: skip


def finish(config: SparsifyConfig) -> None:
    """Removes the work files, and their folder unless it holds other files. To be called once all
    outputs are written."""
    source = dense_folder(config)
    for folder in config.work_folder.glob(TRAINED + "*"):
        _remove_files(folder, lambda name: is_written(name, source))
    remove_stale(config.state_path)
    config.state_path.unlink(missing_ok=True)
    remove_dense(config)


def remove_dense(config: SparsifyConfig) -> None:
    """Removes the dense checkpoint that `make_checkpoint` made."""
    _remove_files(config.work_folder / DENSE, lambda name: name in CHECKPOINT_FILES)
    with suppress(OSError):  # other files in it
        config.work_folder.rmdir()


def _remove_files(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Removes our files in a folder, and the folder unless it holds other files."""
    with suppress(OSError):  # not there, not empty, or may not be removed
        for file in folder.iterdir():
            if is_ours(file.name):
                file.unlink()
        folder.rmdir()


def dense_folder(config: SparsifyConfig) -> Path:
    """The dense checkpoint's folder: the model, or what `make_checkpoint` makes of a model file."""
    return config.model if config.model.is_dir() else config.work_folder / DENSE


def make_checkpoint(config: SparsifyConfig) -> None:
    """Makes the dense checkpoint if the model is a file and has none yet. Raises HotsplitError
    for a model that cannot be trained, and if the checkpoint cannot be written."""
    folder = config.work_folder / DENSE
    try:
        as_checkpoint(config.model, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:120]
        raise HotsplitError(f"{folder}: cannot be written ({reason}); make room for it") from error


def _name_and_size(file: Path) -> str:
    return f"{file.name} {file.stat().st_size}" if file.is_file() else file.name

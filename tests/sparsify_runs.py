"""A tiny random model and a text for the tests of `sparsify`, and a run's config for them."""

from pathlib import Path

import numpy as np
import torch
from checkpoints import random_llama

from hotsplit.profile.corpus.processes import Ranks
from hotsplit.sparsify.config import SparsifyConfig
from hotsplit.sparsify.schedule import Schedule
from hotsplit.sparsify.student import load_student
from hotsplit.sparsify.trainer import Trainer

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "def", "return", "+")


def make_inputs(folder: Path) -> tuple[Path, Path]:
    """(checkpoint, corpus) under `folder`."""
    model, corpus = random_llama(folder / "dense", hidden_act="silu"), folder / "corpus.txt"
    words = np.random.default_rng(0).choice(WORDS, 12_000)
    corpus.write_text("\n".join(" ".join(line) for line in words.reshape(-1, 12)))
    return model, corpus


def tiny_config(inputs: tuple[Path, Path], folder: Path) -> SparsifyConfig:
    """A config of ten steps of 128 tokens that silences 60 % of the neurons, in f32."""
    return SparsifyConfig(
        model=inputs[0], corpora=(inputs[1],), output=folder / "out.gguf", shares=(0.6,),
        tokens=128 * 10, held_out_tokens=256, check_tokens=256, checks=4, window=32,
        batch_tokens=128, micro_tokens=64, learning_rate=1e-3, warmup_steps=2, precision="f32",
        save_checkpoint=folder / "trained", device="cpu",
    )  # fmt: skip


def trainer_of(config: SparsifyConfig) -> Trainer:
    student = load_student(config.model, config.rule, torch.float32, "cpu")
    schedule = Schedule(
        shares=config.targets, steps_of_share=10, learning_rate=1e-3, warmup_steps=1
    )
    return Trainer(config, student, schedule, Ranks())


def windows_of(count: int = 4) -> list[torch.Tensor]:
    return list(torch.randint(1, 257, (count, 32), generator=torch.Generator().manual_seed(1)))

"""Widens a Llama checkpoint without changing its function.

    python wide_model.py CHECKPOINT FOLDER [FACTOR]

reads a Hugging Face folder or a model file, and writes a folder with FACTOR times as many hidden
dimensions, heads and neurons (3 by default), each a copy of one of the model's. A weight that
multiplies a value is split over the copies of that value, by random positive shares that sum to 1,
so the copies of a neuron have different weights. Copies of neurons are scattered over their layer.
Each copy of a gate therefore has the gate's value, and limits and firing rates keep their meaning;
limits in the folder are widened too. A mean square does not change when every value is
repeated, so norms are repeated. With a tied head, logits would be FACTOR times as large: the last
norm is divided by it.

Weights are stored in f16, norms and limits in f32.

Letters: L layers, F neurons of the wide model, C copies, N rows, M columns."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hotsplit.artifacts.limits_file import FILE_NAME as LIMITS_FILE
from hotsplit.sparsify.source import as_checkpoint

SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SMALLEST_SHARE = 0.5  # before shares are divided by their sum; the largest is 1.5
OF_NEURONS = ("gate_proj", "up_proj")  # matrices with a row for each neuron


def split(values: Tensor, copies: int, generator: torch.Generator) -> Tensor:
    """[N, M] -> [N, C*M], whose C copies of a column sum to it."""
    shape = (len(values), copies, values.shape[1])
    shares = torch.rand(shape, generator=generator).add_(SMALLEST_SHARE)
    shares /= shares.sum(1, keepdim=True)
    return shares.mul_(values[:, None, :].float()).flatten(1)


def orders(num_layers: int, num_neurons: int, generator: torch.Generator) -> list[Tensor]:
    """For each layer, which of the copies [F] each neuron of the wide model is."""
    return [torch.randperm(num_neurons, generator=generator) for _ in range(num_layers)]


def widened(
    name: str, values: Tensor, copies: int, order_LF: list[Tensor], generator: torch.Generator
) -> Tensor:
    """A tensor of the wide model. Raises SystemExit for one that a Llama does not have."""
    if name == "model.norm.weight":
        return values.float().repeat(copies)  # `widen` divides it if the head is tied
    if name.endswith("norm.weight"):
        return values.float().repeat(copies)
    if name == "model.embed_tokens.weight":
        return values.float().repeat(1, copies)
    if name == "lm_head.weight":
        return split(values, copies, generator)
    parts = name.split(".")
    if parts[-1] != "weight" or not parts[-2].endswith("_proj"):
        raise SystemExit(f"{name}: not a tensor of a Llama without biases")
    wide = split(values.repeat(copies, 1), copies, generator)
    order_F = order_LF[int(parts[2])]
    if parts[-2] in OF_NEURONS:
        return wide[order_F]
    return wide[:, order_F] if parts[-2] == "down_proj" else wide


def tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


def widen_limits(source: Path, target: Path, copies: int, order_LF: list[Tensor]) -> None:
    """Repeats the limits of neurons, in the wide model's order."""
    found = {}
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118 - no mapping
            found[name] = file.get_tensor(name).repeat(copies)[order_LF[int(name.split(".")[1])]]
    save_file(found, target, metadata=metadata)


def widen(
    source: Path, folder: Path, copies: int, seed: int = 0, dtype: torch.dtype = torch.float16
) -> None:
    """Writes the wide checkpoint; see the module."""
    config = json.loads((source / "config.json").read_text())
    is_tied = config.get("tie_word_embeddings") is True
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    wide = config | {size: config[size] * copies for size in SIZES}
    wide |= {"head_dim": config.get("head_dim") or head_dim}
    generator = torch.Generator().manual_seed(seed)
    order_LF = orders(config["num_hidden_layers"], wide["intermediate_size"], generator)
    found: dict[str, Tensor] = {}
    for name, values in tensors_of(source):
        new = widened(name, values, copies, order_LF, generator)
        if name == "model.norm.weight" and is_tied:
            new /= copies
        found[name] = new.to(torch.float32 if new.dim() == 1 else dtype).contiguous()
    folder.mkdir(parents=True)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(wide, indent=1) + "\n")
    for path in source.glob("*token*"):
        shutil.copy(path, folder)
    if (source / LIMITS_FILE).exists():
        widen_limits(source / LIMITS_FILE, folder / LIMITS_FILE, copies, order_LF)


def main(source: Path, folder: Path, copies: int = 3) -> None:
    if folder.exists():
        raise SystemExit(f"{folder}: exists; give a new one")
    if source.is_dir():
        return widen(source, folder, copies)
    with TemporaryDirectory() as temporary:
        dense = Path(temporary) / "dense"
        as_checkpoint(source, dense)
        return widen(dense, folder, copies)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))

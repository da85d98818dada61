"""Benchmarks a mixture of experts on the CPU against llama.cpp, alternating in one run.

    python benchmarks/experts.py FOLDER --rival path/to/venv/bin/python [--layers 12] [--types q4_k_m,q8_0]

Models: Qwen3-30B-A3B's shape with some of its 48 layers, 128 experts of which 8 a token, in the
stock layout, which both sides run as it is. Weights are random; the router's choices are skewed as by Zipf's law: every
embedding has the same component, by which the logit of the expert with rank r is lower by log r.
Files missing in FOLDER are made first. Each is measured by `hotsplit bench --compare`, which counts
the bytes of the experts that are chosen, and whose JSON is written to FOLDER."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from random_checkpoint import write_tokenizer

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.encode import encode
from hotsplit.convert.tokenizer import tokenizer_keys
from hotsplit.families.experts import Experts
from hotsplit.families.llama import llama_spec
from hotsplit.families.sizes import Sizes
from hotsplit.files.gguf_file import TensorEntry, array_entry
from hotsplit.model.spec import ModelSpec, Rotary, Route

SHAPE = Sizes(
    num_layers=48, hidden_size=2048, num_neurons=768, num_heads=32, num_kv_heads=4, head_dim=128,
    vocab_size=32_000, context_length=4096, epsilon=1e-6,
)  # fmt: skip
ROUTE = Route(num_experts=128, num_used=8)
PIECE = 1536  # rows of random values, encoded once and repeated
COMMON = 1.0  # of all embeddings, relative to their random part


def spec_of(num_layers: int) -> ModelSpec:
    sizes, rotary = replace(SHAPE, num_layers=num_layers), Rotary(theta=1e6, pairing="halves")
    experts = Experts(route=ROUTE, num_neurons=SHAPE.num_neurons)
    return llama_spec(
        sizes, rotary, "silu", architecture="qwen3moe", has_head_norms=True, experts=experts
    )  # fmt: skip


def make_model(path: Path, kind: str, num_layers: int) -> None:
    """Writes a model of one type, or of llama.cpp's Q4_K_M: some of attn_v and ffn_down in q6_k."""
    folder = path.with_suffix(".tokenizer")
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, SHAPE.vocab_size)
    spec = spec_of(num_layers)
    model = ModelFile(
        path=path, layout="stock", model_id="0" * 64, bare_spec=spec,
        threshold_L=(0.0,) * num_layers, predictor=None, tensors={},
        extra_keys=dict(tokenizer_keys(folder, SHAPE.vocab_size, "stock").keys),
    )  # fmt: skip
    shapes, _ = model.expected_shapes()
    shapes["output.weight"] = (spec.vocab_size, spec.hidden_size)
    random = np.random.default_rng(0)
    tensors = {name: _entry(name, dims, kind, random) for name, dims in shapes.items()}
    replace(model, tensors=tensors).save(path)


def _type_of(name: str, kind: str) -> str:
    if kind != "q4_k_m":
        return kind
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    is_finer = name.startswith("output") or (
        ("attn_v" in name or "ffn_down" in name) and layer % 2 == 0
    )
    return "q6_k" if is_finer else "q4_k"


def _entry(name: str, dims: tuple[int, ...], kind: str, random: np.random.Generator) -> TensorEntry:
    if len(dims) == 1:
        return array_entry(np.ones(dims), "f32")
    if "ffn_gate_inp" in name:
        return array_entry(_router(random), "f32")
    width = dims[-1]
    values = random.standard_normal((min(PIECE, prod(dims[:-1])), width), np.float32)
    is_output = "down" in name or "attn_output" in name  # small, so that the common part lasts
    values *= 0.1 / width**0.5 if is_output else width**-0.5
    if name == "token_embd.weight":
        values = values * width**0.5 + COMMON
    piece = encode(torch.from_numpy(values), _type_of(name, kind), name)
    return TensorEntry(shape=dims, kind=_type_of(name, kind), read_rows=_repeated(piece, dims))


def _repeated(piece: np.ndarray, dims: tuple[int, ...]) -> Callable[[int, int], np.ndarray]:
    rows = prod(dims[1:-1])

    def read_rows(start: int, stop: int) -> np.ndarray:
        index = np.arange(start * rows, stop * rows) % len(piece)
        return piece[index].reshape(stop - start, *dims[1:-1], piece.shape[1])

    return read_rows


def _router(random: np.random.Generator) -> np.ndarray:
    """f32 [E, D]: random logits of deviation 1, and minus the logarithm of the expert's rank."""
    width = SHAPE.hidden_size
    logs_E = np.log(random.permutation(ROUTE.num_experts) + 1.0)
    mean = COMMON / np.hypot(1.0, COMMON)  # of the values of a normed embedding
    noise_ED = random.standard_normal((ROUTE.num_experts, width)) / width**0.5
    return noise_ED - logs_E[:, None] / (width * mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rival", required=True)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--types", default="q4_k_m,q8_0")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--prompts", default="16,64,512")
    arguments = parser.parse_args()
    for kind in arguments.types.split(","):
        path = arguments.folder / f"qwen3moe-{arguments.layers}-{kind}.gguf"
        if not path.exists():
            make_model(path, kind, arguments.layers)
        for threads in arguments.threads.split(","):
            command = [
                sys.executable, "-m", "hotsplit", "bench", str(path), "--compare", arguments.rival,
                "-p", arguments.prompts, "-n", "64", "-t", threads, "--json",
            ]  # fmt: skip
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            target = path.with_suffix(f".{threads}.json")
            target.write_text(done.stdout)
            print(f"wrote {target}\n{done.stderr}")


if __name__ == "__main__":
    main()

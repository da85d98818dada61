"""Writes a model file of any size with planted sparsity, and its profile.

The mathematics is that of `planted_checkpoint`; here no checkpoint is made and nothing converted:
rows are made on `Planted.device` while the file is written. Each neuron's firing probability is
known, so the profile is computed, not counted. Seeds depend on names and indices alone, so a file
is the same for any number of threads; files made on a GPU and on a CPU differ.

`write_dense` makes a random SiLU model of the same shape, in llama.cpp's layout too, whose Llama
graph has no ReLU. In a quantised type, its blocks are random bytes with plausible scales.

Letters: L layers, D model width, F neurons, R predictor rank, N rows of a piece."""

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from planted_checkpoint import COMMON, MARGIN, UNSEEN, gate_rows, plant_factors, planted_frequencies
from random_checkpoint import config_of, write_tokenizer
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.artifacts.predictor_file import PredictorMatrix
from hotsplit.artifacts.profile_file import NUM_BINS, Corpus, Profile
from hotsplit.convert.tokenizer import tokenizer_keys
from hotsplit.families.decoder_sizes import Sizes
from hotsplit.families.from_config import read_blueprint
from hotsplit.files.gguf_file import TensorEntry, row_bytes
from hotsplit.model.tensors import Layout

GAIN = 0.9  # a matrix multiplies a vector's norm by about this
ADDED = 0.05  # scale of what attention and feed-forward layers add to the hidden state
PREDICTOR_KIND = "q8_0"
NUM_TOKENS = 1_000_000  # of the computed profile
MADE_ROWS = 512  # rows per draw of random numbers
# By type: bytes of a block, and the offsets of its f16 scales with values that make random bytes a
# distribution around zero of a standard deviation of about 1. q4_k: d and dmin, 7.5 times as large.
RANDOM_BLOCKS = {"q8_0": (34, {0: 1 / 74}), "q4_k": (144, {0: 1 / 250, 2: 7.5 / 250})}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """The model to make; matrices are f16, predictors q8_0."""

    sizes: Sizes
    rank: int  # R, a multiple of 32
    device: torch.device  # where random values are made


@dataclass(frozen=True, kw_only=True)
class Gates:
    """One layer's gates, on the device that makes them: gate_FD = up_FR down_RD + a part
    that the predictor does not see."""

    down_RD: Tensor
    up_FR: Tensor


def write_planted(planted: Planted, path: Path) -> tuple[ModelFile, Profile]:
    """Writes the model file; returns it with a profile of its neurons' firing probabilities."""
    num_layers = planted.sizes.num_layers
    gates = _gates_of(planted)
    gates(0)  # torch loads its solvers for CUDA at their first use; several threads at once fail
    firing_LF = np.stack([_firing(planted.sizes, layer) for layer in range(num_layers)])
    info = PredictorInfo(
        kind="linear",
        rank_L=(planted.rank,) * num_layers,
        threshold_L=(-MARGIN,) * num_layers,
        density_L=tuple(float(_named(firing_F).mean()) for firing_F in firing_LF),
    )

    def entry(name: str, dims: tuple[int, ...]) -> TensorEntry:
        part = name.split(".")[-2]
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        if part == "ffn_gate":
            return _f16_entry(dims, lambda a, b: _gate_rows(name, planted, gates(layer), a, b))
        if part in ("ffn_pred_down", "ffn_pred_up"):
            side = "down_RD" if part == "ffn_pred_down" else "up_FR"
            return _predictor_entry(dims, lambda a, b: getattr(gates(layer), side)[a:b])
        if part == "token_embd":
            return _f16_entry(dims, lambda a, b: _embedding_rows(name, planted, a, b))
        return random_entry(name, dims, planted.device)

    model = _model(planted, "sparse", entry, path, info)
    model.save(path)
    return ModelFile.load(path), _profile(model, firing_LF)


def write_dense(planted: Planted, path: Path, *, layout: Layout, kind: str = "f16") -> None:
    """A SiLU model of the same shape, all of whose neurons fire, with matrices of the type."""

    def entry(name: str, dims: tuple[int, ...]) -> TensorEntry:
        if len(dims) > 1 and kind in RANDOM_BLOCKS:
            return _block_entry(name, dims, kind, planted.device)
        assert kind == "f16" or len(dims) == 1, kind
        return random_entry(name, dims, planted.device)

    _model(planted, layout, entry, path, None).save(path)


def random_entry(name: str, dims: tuple[int, ...], device: torch.device) -> TensorEntry:
    """A norm of ones, or a random f16 matrix, small if its output is added to the hidden state."""
    if len(dims) == 1:
        return TensorEntry(
            shape=dims, kind="f32", read_rows=lambda a, b: np.ones(b - a, np.float32)
        )
    is_added = any(part in name for part in ("attn_output", "ffn_down"))
    std = GAIN / dims[-1] ** 0.5
    if is_added:
        # The same scale in both layouts of a down projection, which differ in the order of dims.
        std = ADDED * GAIN / min(dims) ** 0.5
    return _f16_entry(dims, lambda a, b: std * _normal_rows(name, a, b, dims[-1], device))


def _model(
    planted: Planted,
    layout: Layout,
    entry: Callable[[str, tuple[int, ...]], TensorEntry],
    path: Path,
    info: PredictorInfo | None,
) -> ModelFile:
    sizes = planted.sizes
    config = config_of(sizes) | {"hidden_act": "silu" if info is None else "relu"}
    plan = read_blueprint(path, config, 1 << 20)
    write_tokenizer(path.parent, sizes.vocab_size)
    keys = tokenizer_keys(path.parent, sizes.vocab_size, layout).keys
    model = ModelFile(
        path=path,
        layout=layout,
        model_id=hashlib.sha256(
            f"{sizes} {planted.rank} {layout} {info is None}".encode()
        ).hexdigest(),
        bare_spec=plan.spec,
        keys=plan.keys,
        threshold_L=(0.0,) * sizes.num_layers,
        predictor=info,
        tensors={},
        extra_keys=keys,
    )
    dims, _ = model.expected_shapes()
    dims |= {"output.weight": (sizes.vocab_size, sizes.hidden_size)}
    return replace(model, tensors={name: entry(name, found) for name, found in dims.items()})


def _profile(model: ModelFile, firing_LF: np.ndarray) -> Profile:
    count_LF = np.rint(firing_LF * NUM_TOKENS).astype(np.int64)
    histogram_LB = np.zeros((len(count_LF), NUM_BINS), np.int64)
    histogram_LB[:, 0] = NUM_TOKENS * count_LF.shape[1]
    return Profile(
        model_id=model.model_id,
        num_tokens=NUM_TOKENS,
        threshold_L=model.threshold_L,
        corpora=(Corpus(name="computed", sha256="0" * 64, num_tokens=NUM_TOKENS),),
        active_count_LF=count_LF,
        gate_histogram_LB=histogram_LB,
    )


def _named(firing_F: np.ndarray) -> np.ndarray:
    """The probability that the predictor names each neuron, from its firing probability."""
    mean_F = torch.special.ndtri(torch.from_numpy(firing_F))
    return torch.special.ndtr((mean_F + MARGIN) / (1 - UNSEEN**2) ** 0.5).numpy()


def _gates_of(planted: Planted) -> Callable[[int], Gates]:
    """A function that makes the gates of a layer, and caches those of the last four layers."""
    shape, rank, device = planted.sizes, planted.rank, planted.device

    @lru_cache(maxsize=4)
    def gates(layer: int) -> Gates:
        start_DR = _normal(f"{layer} down", (shape.hidden_size, rank), device)
        up_FR = _normal(f"{layer} up", (shape.num_neurons, rank), device)
        mean_F = torch.special.ndtri(torch.from_numpy(_firing(shape, layer))).to(device)
        down_RD = plant_factors(start_DR, up_FR, mean_F, _common(shape.hidden_size, device))
        return Gates(down_RD=down_RD, up_FR=up_FR)

    return gates


def _firing(shape: Sizes, layer: int) -> np.ndarray:
    """The firing probability of each neuron of a layer, f64 [F]."""
    return planted_frequencies(shape.num_neurons, torch.Generator().manual_seed(layer))


def _gate_rows(name: str, planted: Planted, gates: Gates, start: int, stop: int) -> Tensor:
    rest_ND = _normal_rows(name, start, stop, planted.sizes.hidden_size, planted.device)
    return gate_rows(gates.up_FR[start:stop], gates.down_RD, rest_ND)


def _embedding_rows(name: str, planted: Planted, start: int, stop: int) -> Tensor:
    width, device = planted.sizes.hidden_size, planted.device
    rows_ND = _normal_rows(name, start, stop, width, device)
    return rows_ND + COMMON * width**0.5 * _common(width, device)


@lru_cache(maxsize=1)
def _common(width: int, device: torch.device) -> Tensor:
    """The direction shared by all embeddings, f32 [D]."""
    return torch.nn.functional.normalize(_normal("common", (width,), device), dim=0)


def _normal(name: str, dims: tuple[int, ...], device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(dims, generator=generator, device=device)


def _normal_rows(name: str, start: int, stop: int, width: int, device: torch.device) -> Tensor:
    """Rows start..stop-1 of a matrix, f32 [N, width]: drawn in whole pieces of MADE_ROWS."""
    first = start // MADE_ROWS
    pieces = [
        _normal(f"{name} {number}", (MADE_ROWS, width), device)
        for number in range(first, -(-stop // MADE_ROWS))
    ]
    return torch.cat(pieces)[start - first * MADE_ROWS : stop - first * MADE_ROWS]


def _f16_entry(dims: tuple[int, ...], rows: Callable[[int, int], Tensor]) -> TensorEntry:
    return TensorEntry(
        shape=dims, kind="f16", read_rows=lambda a, b: rows(a, b).half().cpu().numpy()
    )


def _block_entry(name: str, dims: tuple[int, ...], kind: str, device: torch.device) -> TensorEntry:
    """Blocks of random bytes, with f16 scales that make values of a standard deviation of 1 / 4 of
    that of `random_entry`, whatever the matrix is."""
    block_bytes, scales = RANDOM_BLOCKS[kind]
    num_bytes = row_bytes(dims[-1], kind)
    std = 0.25 * GAIN / max(dims) ** 0.5

    def rows(start: int, stop: int) -> np.ndarray:
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{name} {start}".encode()))
        shape = (stop - start, num_bytes // block_bytes, block_bytes)
        bytes_NB = torch.randint(
            0, 256, shape, generator=generator, dtype=torch.uint8, device=device
        )
        blocks_NB = bytes_NB.cpu().numpy()
        for offset, scale in scales.items():
            blocks_NB[..., offset : offset + 2].view(np.float16)[...] = std * scale
        return blocks_NB.reshape(stop - start, num_bytes)

    return TensorEntry(shape=dims, kind=kind, read_rows=rows)


def _predictor_entry(dims: tuple[int, ...], rows: Callable[[int, int], Tensor]) -> TensorEntry:
    assert row_bytes(dims[-1], PREDICTOR_KIND), dims
    return TensorEntry(
        shape=dims,
        kind=PREDICTOR_KIND,
        read_rows=lambda a, b: PredictorMatrix.of(rows(a, b).cpu().numpy(), PREDICTOR_KIND).data,
    )

"""The tensors of a Llama checkpoint, renamed, reordered and encoded when they are written.

Letters: D model width, F neurons of a layer, H heads, P pairs of values of a head."""

from functools import partial

import gguf
import numpy as np
import torch

from sparkinfer.convert.checkpoint import Checkpoint
from sparkinfer.convert.encode import encode, kind_for
from sparkinfer.convert.llama_config import LlamaConfig
from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import TensorEntry, array_entry
from sparkinfer.model_file import Layout, ModelShape, expected_shapes

# Angles that old versions of transformers stored; every reader computes them from the config.
IGNORED_SUFFIX = "rotary_emb.inv_freq"


def llama_entries(
    checkpoint: Checkpoint, config: LlamaConfig, layout: Layout, outtype: str
) -> dict[str, TensorEntry]:
    """Every tensor of the model file by its name there; each is read when it is written.

    Raises SparkinferError for an unknown or missing tensor and a wrong shape."""
    sources = _matched(checkpoint, config)
    entries = {}
    for name, shape in expected_shapes(config.shape, "stock", None).items():
        if name == "output.weight" and name not in sources:
            continue
        is_transposed = layout == "sparse" and name.endswith("ffn_down.weight")
        target = name.replace("ffn_down.", "ffn_down_t.") if is_transposed else name
        target_shape = shape[::-1] if is_transposed else shape
        kind = kind_for(target_shape, outtype)
        read = partial(_read_rows, checkpoint, sources[name], target, kind, config.shape)
        entries[target] = TensorEntry(shape=target_shape, kind=kind, read_rows=read)
    if config.rope_factors is not None:
        entries["rope_freqs.weight"] = array_entry(config.rope_factors, "f32")
    return entries


def adjacent_pairs(num_rows: int, num_heads: int) -> np.ndarray:
    """The order of the rows of a query or key projection [H * 2P, D] in which a rotary pair is
    two adjacent rows: row r of the model file is row order[r] of the checkpoint.

    transformers pairs row p of a head with row p + P, llama.cpp row 2p with row 2p + 1."""
    return np.arange(num_rows).reshape(num_heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _read_rows(
    checkpoint: Checkpoint, source: str, target: str, kind: str, shape: ModelShape,
    start: int, stop: int,
) -> np.ndarray:  # fmt: skip
    """The bytes of some rows of a tensor; nothing of it stays in memory afterwards."""
    whole = checkpoint.read(source)  # held to the end, so that other threads share the mapping
    tensor, rows = whole, None
    if target.endswith("ffn_down_t.weight"):
        tensor = whole[:, start:stop].T
    elif target.endswith(("attn_q.weight", "attn_k.weight")):
        heads = shape.num_heads if target.endswith("attn_q.weight") else shape.num_kv_heads
        rows = adjacent_pairs(len(whole), heads)[start:stop]
    else:
        tensor = whole[start:stop]
    what = f"{checkpoint.tensors[source].file}: tensor {source!r}"
    return encode(tensor, kind, what, rows=rows)


def _matched(checkpoint: Checkpoint, config: LlamaConfig) -> dict[str, str]:
    """The source's name for each name in the model file; exactly one for each that is expected."""
    wanted = expected_shapes(config.shape, "stock", None)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.shape.num_layers)
    sources: dict[str, str] = {}
    for source, tensor in checkpoint.tensors.items():
        if source.endswith(IGNORED_SUFFIX):
            continue
        target = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if target not in wanted or target in sources:
            raise SparkinferError(
                f"{tensor.file}: no rule for tensor {source!r} in a Llama of"
                f" {config.shape.num_layers} layers; is this another architecture?"
            )
        if tensor.shape != wanted[target]:
            raise SparkinferError(
                f"{tensor.file}: tensor {source!r} is {list(tensor.shape)}, wanted"
                f" {list(wanted[target])} by config.json; the two are not of one model"
            )
        sources[target] = source
    return _tied(checkpoint, config, sources, wanted.keys() - sources.keys())


def _tied(
    checkpoint: Checkpoint, config: LlamaConfig, sources: dict[str, str], missing: set[str]
) -> dict[str, str]:
    """`sources` without an output head that is the embedding again; refuses missing tensors."""
    may_tie = config.is_tied is not False
    lacking = sorted(missing - ({"output.weight"} if may_tie else set()))
    if lacking:
        raise SparkinferError(
            f"{checkpoint.folder}: no tensor for {lacking[0]!r}"
            f" ({len(lacking)} missing); download the checkpoint again"
        )
    if config.is_tied and "output.weight" in sources:
        head, embedding = sources.pop("output.weight"), sources["token_embd.weight"]
        if not torch.equal(checkpoint.read(head), checkpoint.read(embedding)):
            raise SparkinferError(
                f"{checkpoint.folder}: tie_word_embeddings is true, but {head!r} is not"
                f" {embedding!r}; set it to false in config.json, or remove {head!r}"
            )
    return sources

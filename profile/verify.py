"""Is a written model file the model it was made from? Logits of both on a short text.

The reference is the source's own graph (transformers' in f32, or for a GGUF our runtime's) with
the values that the file holds put back into it. So the rounding of the file's types, which grows
from layer to layer, is on both sides, and what is left is wrong names, wrong order, a wrong graph.
That the values are the source's to their rounding is checked when they are put back.

What this module does not know: how a file is written.

Letters: T tokens, V vocabulary."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparkinfer.budget import kv_kind
from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import array_entry
from sparkinfer.model_file import ModelFile, read_model_gguf
from sparkinfer.profile.calibrate import free_memory_bytes
from sparkinfer.runtime.engine import Engine
from sparkinfer.runtime.text import TextCodec
from sparkinfer.written import Restored, Written

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1876, def fib(n): return n if n < 2 else"
    " fib(n - 1) + fib(n - 2)  # naïve, but right; 0x1F + 3.14 = ?\n"
)
MAX_TOKENS = 48
# Relative error of the logits, by the type of the KV cache: a wrong file has one near 1.
BOUNDS = {"f32": 1e-4, "f16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """`relative_error` is |got - want| / |want| over all logits; None where there was nothing to
    compare with, and `line` says why."""

    relative_error: float | None
    line: str


class Skipped(Exception):
    """Why there is no reference."""


@torch.inference_mode()
def verify(written: Written) -> Verification:
    """Raises SparkinferError where the file is not its source."""
    model = ModelFile.load(written.path)
    ids = text_token_ids(model)
    is_folder = written.source.is_dir()
    name = "transformers'" if is_folder else "the source's"
    try:
        want_TV = (_transformers_logits if is_folder else _source_logits)(written, ids)
    except Skipped as reason:
        for _ in written.restored():  # the values can be checked in any case
            pass
        return Verification(relative_error=None, line=f"values verified, logits not: {reason}")
    with Engine.of(model, mode="dense", device="cpu", context_length=len(ids)) as engine:
        got_TV = engine.logits(ids)
    error, bound = _relative_error(got_TV, want_TV), BOUNDS[kv_kind(model)]
    if not error <= bound:
        raise SparkinferError(
            f"{written.path.name.removesuffix('.partial')}: its logits differ from {name} by"
            f" {error:.1e} on {len(ids)} tokens, more than {bound:.0e}; the file is not kept:"
            " please report the source; --no-verify keeps it"
        )
    line = f"verified: logits equal {name} to {error:.1e} on {len(ids)} tokens"
    return Verification(relative_error=error, line=line)


def text_token_ids(model: ModelFile) -> list[int]:
    """Of the text, by the file's tokenizer; without one any tokens will do."""
    limit, vocab_size = min(MAX_TOKENS, model.shape.context_length), model.shape.vocab_size
    try:
        ids = [token for token in TextCodec.of(model).encode(TEXT) if token < vocab_size]
    except SparkinferError:  # the file has none that is known
        ids = []
    return (ids or [(7919 * place + 11) % vocab_size for place in range(MAX_TOKENS)])[:limit]


def _relative_error(got_TV: Tensor, want_TV: Tensor) -> float:
    if got_TV.shape != want_TV.shape:
        return math.inf
    want_TV = want_TV.double()
    error = (got_TV.double() - want_TV).norm() / want_TV.norm().clamp(min=1e-30)
    return error.item() if bool(torch.isfinite(error)) else math.inf


def _transformers_logits(written: Written, ids: list[int]) -> Tensor:
    """f32 [T, V]. Raises Skipped where transformers cannot run the checkpoint, or not here."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.activations import ACT2FN
    from transformers.configuration_utils import PretrainedConfig
    from transformers.utils.logging import disable_progress_bar

    folder = written.source
    values, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
    if values.get("model_type") not in CONFIG_MAPPING:
        raise Skipped(f"transformers does not know model_type {values.get('model_type')!r}")
    activation = values.get("hidden_act")
    if activation is not None and activation not in ACT2FN:
        raise Skipped(f"transformers does not know the activation {activation!r}")
    _refuse_too_large(folder)
    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, local_files_only=True
        ).eval()
    except (ValueError, RuntimeError, OSError, KeyError, TypeError, AttributeError) as error:
        line = str(error).strip().splitlines() or [type(error).__name__]
        raise Skipped(f"transformers cannot load the checkpoint ({line[0]})") from error
    _put_back(model.state_dict(), written.restored())
    return model(torch.tensor([ids])).logits[0].float()


def _put_back(state: dict[str, Tensor], restored: Iterable[Restored]) -> None:
    """Overwrites the weights of a model with those of the file."""
    for item in restored:
        names = [n for n in state if n == item.source or n.endswith("." + item.source)]
        if len(names) != 1:
            raise Skipped(f"transformers has another name for the tensor {item.source!r}")
        values = torch.from_numpy(item.values)
        if item.rows is None:
            state[names[0]].copy_(values)
        else:
            state[names[0]][torch.from_numpy(item.rows)] = values


def _refuse_too_large(folder: Path) -> None:
    """f32 and what is made on the way take three times the size of a 16-bit file (measured)."""
    files = [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    needed, free = 3 * sum(file.stat().st_size for file in files), free_memory_bytes()
    if needed > 0.8 * free:
        raise Skipped(
            f"transformers needs about {needed / 1e9:.0f} GB for it, {free / 1e9:.0f} GB are free"
        )


def _source_logits(written: Written, ids: list[int]) -> Tensor:
    """f32 [T, V] of our runtime on the source's header and layout, with the file's values."""
    keys, tensors = read_model_gguf(written.source)
    needed = sum(4 * math.prod(entry.shape) for entry in tensors.values())
    if needed > 0.8 * free_memory_bytes():
        raise Skipped(f"the source needs about {needed / 1e9:.0f} GB in f32")
    own = ModelFile.load(written.path)
    keys = keys | {"sparkinfer.ffn.activation": own.activation}
    keys["sparkinfer.ffn.threshold"] = list(own.threshold_L)
    entries = {r.source: array_entry(r.values, "f32") for r in written.restored()}
    entries |= {n: e for n, e in tensors.items() if "ffn_pred_" in n}
    source = ModelFile.of(written.source, keys, entries)
    with Engine.of(source, mode="dense", device="cpu", context_length=len(ids)) as engine:
        return engine.logits(ids)

"""Is a written model file the model it was made from? Logits of both on a short text.

The reference is transformers on the checkpoint in f32, or for a GGUF our runtime on the source.
What this module does not know: how a file is written.

Letters: T tokens, V vocabulary."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparkinfer.errors import SparkinferError
from sparkinfer.model_file import KINDS, TOKENIZER_KEY, ModelFile, read_model_gguf
from sparkinfer.profile.calibrate import free_memory_bytes
from sparkinfer.runtime.engine import Engine
from sparkinfer.runtime.text import TextCodec

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1876, def fib(n): return n if n < 2 else"
    " fib(n - 1) + fib(n - 2)  # naïve, but right; 0x1F + 3.14 = ?\n"
)
MAX_TOKENS = 48
# Relative error of the logits up to which they are the same: a wrong file has one near 1. The
# rounding of a type grows with depth; these leave it room (measured figures in docs/log.md).
BOUNDS = {"f32": 1e-4, "f16": 5e-3, "bf16": 5e-2, "q8_0": 5e-2, "q4_0": 0.5}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """`relative_error` is |got - want| / |want| over all logits; None, with the reason, where
    there was nothing to compare with."""

    relative_error: float | None
    num_tokens: int
    line: str


class Skipped(Exception):
    """Why there is no reference."""


def verify(source: Path, written: Path) -> Verification:
    """Compares the file `written` with its source.

    Raises SparkinferError where they differ."""
    model = ModelFile.load(written)
    ids = text_token_ids(model)
    try:
        is_folder = source.is_dir()
        want_TV = _transformers_logits(source, ids) if is_folder else _source_logits(source, ids)
    except Skipped as reason:
        return Verification(relative_error=None, num_tokens=0, line=f"not verified: {reason}")
    with Engine.load(written, mode="dense", device="cpu", context_length=len(ids)) as engine:
        got_TV = engine.logits(ids)
    error = _relative_error(got_TV, want_TV)
    bound = max(BOUNDS[entry.kind] for entry in model.tensors.values())
    reference = "transformers'" if is_folder else "the source's"
    if not error <= bound:
        raise SparkinferError(
            f"{written.name.removesuffix('.partial')}: its logits differ from {reference} by"
            f" {error:.1e} on {len(ids)} tokens, more than rounding does ({bound:.0e}); the file is"
            " not kept: please report the checkpoint; --no-verify keeps it"
        )
    line = f"verified: logits equal {reference} to {error:.1e} on {len(ids)} tokens"
    return Verification(relative_error=error, num_tokens=len(ids), line=line)


def _relative_error(got_TV: Tensor, want_TV: Tensor) -> float:
    if got_TV.shape != want_TV.shape:
        return math.inf
    want_TV = want_TV.double()
    error = (got_TV.double() - want_TV).norm() / want_TV.norm().clamp(min=1e-30)
    return error.item() if bool(torch.isfinite(error)) else math.inf


def text_token_ids(model: ModelFile) -> list[int]:
    """Of the text, by the file's tokenizer; without one any tokens will do."""
    limit, vocab_size = min(MAX_TOKENS, model.shape.context_length), model.shape.vocab_size
    if model.text(TOKENIZER_KEY) is None:
        return [(7919 * position + 11) % vocab_size for position in range(limit)]
    ids = TextCodec.of(model).encode(TEXT)
    return [token for token in ids if token < vocab_size][:limit]


def _transformers_logits(folder: Path, ids: list[int]) -> Tensor:
    """f32 [T, V]. Raises Skipped where transformers cannot run the checkpoint, or not here."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.activations import ACT2FN
    from transformers.configuration_utils import PretrainedConfig
    from transformers.utils.logging import disable_progress_bar

    values, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
    if values.get("model_type") not in CONFIG_MAPPING:
        raise Skipped(f"transformers does not know model_type {values.get('model_type')!r}")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    activation = getattr(config, "hidden_act", None)
    if activation is not None and activation not in ACT2FN:
        raise Skipped(f"transformers does not know the activation {activation!r}")
    _refuse_too_large(folder)
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, local_files_only=True
        ).eval()
    except (ValueError, RuntimeError, OSError, KeyError, TypeError) as error:
        line = str(error).strip().splitlines() or [type(error).__name__]
        raise Skipped(f"transformers cannot load the checkpoint ({line[0]})") from error
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def _refuse_too_large(folder: Path) -> None:
    """Every weight takes four bytes in f32; files have two or more a weight."""
    files = [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
    needed, free = 2 * sum(file.stat().st_size for file in files), free_memory_bytes()
    if needed > 0.8 * free:
        raise Skipped(
            f"transformers needs about {needed / 1e9:.0f} GB for it, {free / 1e9:.0f} GB are free"
        )


def _source_logits(source: Path, ids: list[int]) -> Tensor:
    """f32 [T, V] of our runtime on the file that was converted."""
    _, tensors = read_model_gguf(source)
    foreign = sorted({entry.kind for entry in tensors.values()} - set(KINDS))
    if foreign:
        raise Skipped(f"the source has types that are only converted, not run ({foreign[0]})")
    with Engine.load(source, mode="dense", device="cpu", context_length=len(ids)) as engine:
        return engine.logits(ids)

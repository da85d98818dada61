"""A kind of input of the fuzz tests, and one case of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.model.mode_quality import ModeQuality
from hotsplit.runtime.text.codec import TextCodec

QUALITY = ModeQuality(
    perplexity_increase=0.001,
    perplexity_half_width=0.01,
    kl_mean=0.001,
    top1_agreement=0.99,
    num_tokens=100,
    bytes_per_token=1000,
    dense_bytes_per_token=2000,
    corpus_sha256="0" * 64,
)


@dataclass(frozen=True, kw_only=True)
class FuzzCase:
    """`path` is the damaged file, `inputs` the folder of all valid inputs, `output` a path in a new
    folder."""

    number: int
    path: Path
    inputs: Path
    output: Path

    @property
    def folder(self) -> Path:
        return self.path.parent


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`target` is the file that is damaged; `is_values`: in its JSON values, not its bytes."""

    target: str
    read: Callable[[FuzzCase], object]
    is_values: bool = False


@cache
def codec_of(inputs: Path) -> TextCodec:
    return TextCodec.of(ModelFile.load(inputs / "silu.gguf"))

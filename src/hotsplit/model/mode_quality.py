"""The measured quality of a mode compared with the same model run densely, and the bytes that it
reads.

`profile` measures it and writes it into the profile and the predictors;
`convert` puts it into the model file, and mode_choice uses it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import Fields, shown

SparseMode = Literal["exact", "predicted"]
# The largest relative rise of the perplexity that a default mode may cost.
MAX_LOSS = 0.01


@dataclass(frozen=True, kw_only=True)
class ModeQuality:
    """One mode, measured on held-out text. Shares and increases are relative: 0.01 is 1 %. Bytes
    are those of all weights that a token reads: attention, norms, predictors, neurons and head, but
    not the embedding."""

    perplexity_increase: float
    perplexity_half_width: float  # of the 95 % interval of the increase
    kl_mean: float  # nats
    top1_agreement: float  # share of tokens with the same most likely next token
    num_tokens: int
    bytes_per_token: int
    dense_bytes_per_token: int  # of the file that it was measured on
    corpus_sha256: str

    def validate(self, mode: str) -> None:
        """Raises HotsplitError for a number outside the range of possible measurements."""
        found = asdict(self)
        for name, (least, most) in _RANGES.items():
            if not least <= found[name] <= most:
                raise HotsplitError(
                    f"quality of mode {mode}: {name} is {found[name]}, wanted {least:g} to {most:g}"
                )


_RANGES = {
    "perplexity_increase": (math.nextafter(-1.0, 0.0), 1e12),
    "perplexity_half_width": (0.0, 1e12),
    "kl_mean": (0.0, 1e6),
    "top1_agreement": (0.0, 1.0),
    "num_tokens": (1, 1 << 53),
    "bytes_per_token": (1, 1 << 53),
    "dense_bytes_per_token": (1, 1 << 53),
}
_NAMES = {field.name for field in fields(ModeQuality)}


def is_recordable(quality: ModeQuality) -> bool:
    """True if all numbers are finite and in range: a broken mode gets no record."""
    try:
        quality.validate("")
    except HotsplitError:
        return False
    return all(math.isfinite(v) for v in asdict(quality).values() if isinstance(v, float))


def read_quality(values: object, name: str) -> dict[SparseMode, ModeQuality]:
    """Reads the qualities by mode from the form of `quality_values`; errors call them `name`.

    Raises HotsplitError for other modes, other fields, and impossible numbers."""
    read = Fields(values, name)
    unknown = sorted(set(map(str, read.values)) - set(get_args(SparseMode)))
    if unknown:
        raise HotsplitError(f"{name} has {shown(unknown[0])}, wanted exact and predicted")
    modes: tuple[SparseMode, ...] = get_args(SparseMode)
    return {mode: _of(read.part(mode, _NAMES), mode) for mode in modes if mode in read.values}


def quality_values(
    quality: Mapping[SparseMode, ModeQuality],
) -> dict[str, dict[str, float | int | str]]:
    """The qualities, validated, in the form stored in JSON and GGUF."""
    for mode, of_mode in quality.items():
        of_mode.validate(mode)
    return {mode: asdict(of_mode) for mode, of_mode in quality.items()}


def _of(read: Fields, mode: str) -> ModeQuality:
    quality = ModeQuality(
        perplexity_increase=read.number("perplexity_increase"),
        perplexity_half_width=read.number("perplexity_half_width"),
        kl_mean=read.number("kl_mean"),
        top1_agreement=read.number("top1_agreement"),
        num_tokens=read.count("num_tokens"),
        bytes_per_token=read.count("bytes_per_token"),
        dense_bytes_per_token=read.count("dense_bytes_per_token"),
        corpus_sha256=read.text("corpus_sha256"),
    )
    quality.validate(mode)
    return quality

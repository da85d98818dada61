"""The measured quality of a mode compared with the same model run densely, and the bytes that it
reads.

`profile` measures it and writes it into the profile and the predictors;
`convert` puts it into the model file, and mode_choice uses it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from hotsplit.errors import HotsplitError
from hotsplit.files.declared import Share, read_declared

SparseMode = Literal["exact", "predicted"]
Number = Annotated[int, Ge(1), Le(1 << 53)]
# The largest relative rise of the perplexity that a default mode may cost.
MAX_LOSS = 0.01


@dataclass(frozen=True, kw_only=True)
class ModeQuality:
    """One mode, measured on held-out text. Shares and increases are relative: 0.01 is 1 %. Bytes
    are those of all weights that a token reads: all but the embedding."""

    perplexity_increase: Annotated[float, Gt(-1), Le(1e12)]
    perplexity_half_width: Annotated[float, Ge(0), Le(1e12)]  # of the increase's 95 % interval
    kl_mean: Annotated[float, Ge(0), Le(1e6)]  # nats
    top1_agreement: Share  # of tokens with the same most likely next token
    num_tokens: Number
    bytes_per_token: Number
    dense_bytes_per_token: Number  # of the file that it was measured on
    corpus_sha256: str


def is_recordable(quality: ModeQuality) -> bool:
    """True if all numbers are finite and in range: a broken mode gets no record."""
    try:
        read_declared(ModeQuality, asdict(quality))
    except HotsplitError:
        return False
    return True


def read_quality(values: object, name: str) -> dict[SparseMode, ModeQuality]:
    """Reads the qualities by mode from the form of `quality_values`; errors call them `name`.
    Raises HotsplitError for other modes, other fields, and impossible numbers."""
    return read_declared(dict[SparseMode, ModeQuality], values, name)


def quality_values(
    quality: Mapping[SparseMode, ModeQuality],
) -> dict[str, dict[str, float | int | str]]:
    """The qualities, validated, in the form stored in JSON and GGUF."""
    values = {str(mode): asdict(of_mode) for mode, of_mode in quality.items()}
    read_quality(values, "quality")
    return values

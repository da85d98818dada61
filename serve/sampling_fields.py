"""Reads the sampling fields of requests, under llama-server's names; an absent field keeps the
server's default."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from hotsplit.errors import HotsplitError
from hotsplit.options.generation import SamplingOptions, samplers_of_letters, samplers_of_names
from hotsplit.serve.api_error import ApiError, wrong
from hotsplit.serve.fields import Fields

MAX_BIASES, MAX_BIAS, MAX_BIASED_LENGTH = 1024, 1e6, 256
MAX_BREAKERS, MAX_BREAKER_LENGTH = 64, 256
RANDOM_SEEDS = (-1, 0xFFFFFFFF)  # llama.cpp's values for a random seed
# A request's name -> the field of SamplingOptions, where they differ.
RENAMED = {
    "typical_p": "typ_p",
    "repetition_penalty": "repeat_penalty",
    "mirostat_tau": "mirostat_ent",
    "mirostat_eta": "mirostat_lr",
}
NUMBERS = (
    "temperature",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_p",
    "min_p",
    "typical_p",
    "typ_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "repeat_penalty",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "adaptive_target",
    "adaptive_decay",
    "mirostat_tau",
    "mirostat_eta",
)
WHOLE = (
    "top_k",
    "repeat_last_n",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "mirostat",
    "min_keep",
)
_INT32 = (1 << 31) - 1


def take_sampling(
    fields: Fields, defaults: SamplingOptions, encode: Callable[[str], list[int]], vocab_size: int
) -> SamplingOptions:
    """The request's options. `encode` tokenises the texts of `logit_bias`. Raises ApiError for
    invalid values."""
    given: dict[str, object] = {}
    names: dict[str, str] = {}  # a field of SamplingOptions -> the request's name
    for name in NUMBERS:
        if (number := fields.number(name)) is not None:
            given[RENAMED.get(name, name)] = number
            names[RENAMED.get(name, name)] = name
    for name in WHOLE:
        if (count := fields.whole(name, -_INT32, _INT32)) is not None:
            given[name] = count
    seed = fields.whole("seed", -(1 << 63), (1 << 64) - 1)
    if seed is not None:
        given["seed"] = None if seed in RANDOM_SEEDS else seed
    breakers = fields.has("dry_sequence_breakers")
    found = texts_of(fields, "dry_sequence_breakers", MAX_BREAKERS, MAX_BREAKER_LENGTH)
    if breakers:
        given["dry_sequence_breakers"] = found
    if bias := take_bias(fields, encode, vocab_size):
        given["logit_bias"] = bias
    try:
        if (samplers := fields.take("samplers")) is not None:
            given["samplers"] = _samplers(samplers)
        return replace(defaults, **given)  # type: ignore[arg-type]
    except HotsplitError as error:
        raise _named(error, names) from error


def take_bias(
    fields: Fields, encode: Callable[[str], list[int]], vocab_size: int
) -> tuple[tuple[int, float], ...]:
    """Reads OpenAI's {"15043": -100} or llama-server's [[15043, 1.5], [" Hello", false]], where
    false bans a token and the bias of a text applies to each of its tokens."""
    value = fields.take("logit_bias")
    pairs = list(value.items()) if isinstance(value, dict) else value
    if value is None:
        return ()
    if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
        raise wrong(
            "logit_bias", f"logit_bias: wanted up to {MAX_BIASES} biases, as an object or a list"
        )
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise wrong("logit_bias", "logit_bias: wanted pairs of a token and its bias")
        token, bias = pair
        if bias is False:
            bias = float("-inf")
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not (abs(bias) <= MAX_BIAS or bias == float("-inf")):
            raise wrong(
                "logit_bias", f"logit_bias of {str(token)[:40]!r}: wanted a number up to {MAX_BIAS}"
            )
        for token_id in _biased(token, encode, is_key=isinstance(value, dict)):
            if not 0 <= token_id < vocab_size:
                raise wrong(
                    "logit_bias",
                    f"logit_bias: there is no token {token_id}, wanted 0 to {vocab_size - 1}",
                )
            found[token_id] = found.get(token_id, 0.0) + bias
    return tuple(found.items())


def _biased(token: object, encode: Callable[[str], list[int]], *, is_key: bool) -> list[int]:
    if isinstance(token, int) and not isinstance(token, bool):
        return [token]
    is_number = isinstance(token, str) and re.fullmatch(r"-?[0-9]{1,19}", token) is not None
    if isinstance(token, str) and is_key and is_number:
        return [int(token)]
    if isinstance(token, str) and not is_key and len(token) <= MAX_BIASED_LENGTH:
        return encode(token)
    raise wrong("logit_bias", f"logit_bias: {str(token)[:40]!r} is not a token id or is too long")


def texts_of(fields: Fields, name: str, most: int, longest: int) -> tuple[str, ...]:
    """Reads a text or a list of texts, none of them empty."""
    value = fields.take(name)
    values = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(values, list) or len(values) > most:
        raise fields.refuse(name, value, f"a list of up to {most} texts")
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            raise fields.refuse(name, value, f"text of 1 to {longest} characters")
    return tuple(str(value) for value in values)


def _samplers(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return samplers_of_letters(value)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise wrong("samplers", "samplers: wanted a list of names, or their letters")
    return samplers_of_names(";".join(value))


def _named(error: HotsplitError, names: Mapping[str, str]) -> ApiError:
    """Converts an error of SamplingOptions, whose message begins with a field's name, to an
    ApiError with the request's name for that field."""
    first = str(error).split()[0]
    param = names.get(first, first if first in (*WHOLE, "seed", "samplers") else None)
    return wrong(param, str(error).replace(first, param or first, 1))

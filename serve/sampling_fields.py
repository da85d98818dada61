"""Sampling fields of requests, by llama-server's names; absent ones keep the server's default."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from pydantic import Field, PlainValidator

from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import (
    SamplingOptions,
    samplers_of_letters,
    samplers_of_names,
)
from hotsplit.serve.api_error import wrong
from hotsplit.serve.request_body import Number, RequestBody, Whole, refused, texts

MAX_BIASES, MAX_BIAS, MAX_BIASED_LENGTH = 1024, 1e6, 256
RANDOM_SEEDS = (-1, 0xFFFFFFFF)  # llama.cpp's values for a random seed
# A request's name -> the field of SamplingOptions, where they differ.
RENAMED = {
    "typical_p": "typ_p",
    "repetition_penalty": "repeat_penalty",
    "mirostat_tau": "mirostat_ent",
    "mirostat_eta": "mirostat_lr",
}
_INT32 = (1 << 31) - 1
_Int32 = Annotated[Whole, Field(ge=-_INT32, le=_INT32)]
_TokenBias = tuple[int | str, float]  # of a token id, or of each token of a text


def _biases(value: object) -> tuple[_TokenBias, ...]:
    """OpenAI's {"15043": -100} or llama-server's [[15043, 1.5], [" Hello", false]]; false bans."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
        raise ValueError(f"up to {MAX_BIASES} biases, as an object or a list")
    found: list[_TokenBias] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError("pairs of a token and its bias")
        token, bias = pair
        if isinstance(value, dict) and re.fullmatch(r"-?[0-9]{1,19}", token):
            token = int(token)
        is_text = isinstance(value, list) and isinstance(token, str)
        if type(token) is not int and not (is_text and len(token) <= MAX_BIASED_LENGTH):
            shown = str(token)[:40]
            raise refused("invalid_value", f": {shown!r} is not a token id or is too long")
        if bias is False:
            bias = float("-inf")
        elif type(bias) not in (int, float) or not abs(bias) <= MAX_BIAS:
            shown = str(token)[:40]
            raise refused("invalid_value", f" of {shown!r}: wanted a number up to {MAX_BIAS}")
        found.append((token, bias))
    return tuple(found)


def _samplers(value: object) -> tuple[str, ...]:
    try:
        if isinstance(value, str):
            return samplers_of_letters(value)
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return samplers_of_names(";".join(value))
    except HotsplitError as error:
        raise refused("invalid_value", f": {error}") from error
    raise ValueError("a list of names, or their letters")


Samplers = Annotated[tuple[str, ...], PlainValidator(_samplers)]


class SamplingBody(RequestBody):
    temperature: Number | None = None
    dynatemp_range: Number | None = None
    dynatemp_exponent: Number | None = None
    top_k: _Int32 | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    typ_p: Number | None = None
    top_n_sigma: Number | None = None
    xtc_probability: Number | None = None
    xtc_threshold: Number | None = None
    repeat_last_n: _Int32 | None = None
    repeat_penalty: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    dry_multiplier: Number | None = None
    dry_base: Number | None = None
    dry_allowed_length: _Int32 | None = None
    dry_penalty_last_n: _Int32 | None = None
    dry_sequence_breakers: Annotated[tuple[str, ...] | None, texts(64, 256)] = None
    adaptive_target: Number | None = None
    adaptive_decay: Number | None = None
    mirostat: _Int32 | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    min_keep: _Int32 | None = None
    seed: Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    logit_bias: Annotated[tuple[_TokenBias, ...] | None, PlainValidator(_biases)] = None
    samplers: Samplers | None = None


def sampling_of(
    body: SamplingBody,
    defaults: SamplingOptions,
    encode: Callable[[str], list[int]],
    vocab_size: int,
) -> SamplingOptions:
    """The request's options. `encode` tokenises texts of `logit_bias`. Raises ApiError."""
    given = {name: getattr(body, name) for name in SamplingBody.model_fields}
    given = {name: value for name, value in given.items() if value is not None}
    names = {RENAMED.get(name, name): name for name in given}  # those of SamplingOptions -> given
    options = {RENAMED.get(name, name): value for name, value in given.items()}
    if body.seed in RANDOM_SEEDS:
        options["seed"] = None
    if body.logit_bias is not None:
        found: dict[int, float] = {}
        for token, bias in body.logit_bias:
            for token_id in encode(token) if isinstance(token, str) else [token]:
                if not 0 <= token_id < vocab_size:
                    wanted = f"wanted 0 to {vocab_size - 1}"
                    raise wrong("logit_bias", f"logit_bias: there is no token {token_id}, {wanted}")
                found[token_id] = found.get(token_id, 0.0) + bias
        options["logit_bias"] = tuple(found.items())
    try:
        return replace(defaults, **options)
    except HotsplitError as error:  # its message begins with a field's name
        first = str(error).split()[0]
        param = names.get(first)
        raise wrong(param, str(error).replace(first, param or first, 1)) from error

"""Selects the samplers that a chain runs: those that the options do not turn off, in order."""

from hotsplit.runtime.generate.sampling_options import SamplingOptions

# These always keep the token with the largest logit (the lowest id among equal logits).
_KEEP_LARGEST = ("top_n_sigma", "top_k", "top_p", "min_p")


def active_samplers(options: SamplingOptions, vocab_size: int) -> tuple[str, ...]:
    """Names of the samplers; with Mirostat, only temperature and Mirostat, as in llama.cpp.

    If the temperature leaves one token, the samplers after it are dropped, and so are those
    directly before it that always keep that token."""
    if options.mirostat:
        names = ["temperature", f"mirostat_{options.mirostat}"]
    else:
        names = [name for name in options.samplers if name != "adaptive_p"]
        names += ["adaptive_p"] * ("adaptive_p" in options.samplers)
    names = [name for name in names if not is_off(name, options, vocab_size)]
    if is_greedy(options) and "temperature" in names:
        names = names[: names.index("temperature")]
        while names and names[-1] in _KEEP_LARGEST:
            names.pop()
        names.append("temperature")
    return tuple(names)


def is_greedy(options: SamplingOptions) -> bool:
    """True if the temperature, when it is among the samplers, leaves only the largest logit."""
    return options.temperature <= 0 and (options.dynatemp_range == 0 or options.mirostat != 0)


def is_off(name: str, options: SamplingOptions, vocab_size: int) -> bool:
    """True if this sampler returns its input unchanged with these options."""
    o = options
    return {
        "penalties": o.repeat_last_n == 0
        or (o.repeat_penalty, o.presence_penalty, o.frequency_penalty) == (1, 0, 0),
        "dry": o.dry_multiplier == 0 or o.dry_penalty_last_n == 0,
        "top_n_sigma": o.top_n_sigma <= 0,
        "top_k": not 0 < o.top_k < vocab_size,
        "typ_p": o.typ_p == 1,
        "top_p": o.top_p == 1,
        "min_p": o.min_p == 0,
        "xtc": o.xtc_probability == 0 or o.xtc_threshold > 0.5,
        "temperature": o.temperature == 1 and (o.dynatemp_range == 0 or o.mirostat != 0),
        "adaptive_p": o.adaptive_target < 0,
        "mirostat_1": False,
        "mirostat_2": False,
    }[name]

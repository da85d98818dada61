"""Builds a sampler chain for a model from the user's options."""

from dataclasses import replace

from hotsplit.runtime.generate.chain import SamplerChain
from hotsplit.runtime.generate.dry import BreakerSets
from hotsplit.runtime.generate.sampling_options import SamplingOptions


def sampling_of(
    sampling: SamplingOptions | None = None,
    temperature: float | None = None,
    seed: int | None = None,
) -> SamplingOptions:
    """`sampling`, or llama.cpp's defaults, with temperature and seed replaced if given."""
    found = sampling or SamplingOptions()
    if temperature is not None:
        found = replace(found, temperature=temperature)
    return found if seed is None else replace(found, seed=seed)


def chain_of(sampling: SamplingOptions, sets: BreakerSets, vocab_size: int) -> SamplerChain:
    """Builds the chain. Raises HotsplitError for a bias on a token that the model lacks."""
    breakers = None
    if sampling.dry_multiplier and sampling.dry_sequence_breakers:
        breakers = sets.of(sampling.dry_sequence_breakers)
    return SamplerChain(sampling, vocab_size, breakers)

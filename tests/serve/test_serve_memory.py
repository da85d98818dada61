"""The server's main memory and caches: a cache that does not fit is refused, a finished text is
freed at once (with Python's cycle collector off), and texts that read selected keys answer as if
alone."""

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import CONTEXT, Served, leave

from hotsplit import Engine
from hotsplit.commands.serve import _check_memory
from hotsplit.errors import HotsplitError
from hotsplit.options.engine_config import EngineConfig
from hotsplit.options.generation_options import GenerationOptions, SamplingOptions
from hotsplit.runtime.generate.sampler_chain import SamplerChain
from hotsplit.serve.exchange import Exchange
from hotsplit.serve.prefix_cache import PrefixCache
from hotsplit.serve.scheduler import Scheduler
from hotsplit.serve.texts import TextJob

pytest_plugins = ("serve_fixtures",)


def test_a_cache_that_does_not_fit_is_refused_before_the_model_is_loaded(model, monkeypatch):
    with Engine.load(model, context_length=100, num_sequences=7) as engine:
        cache = sum(items.get("kv_cache", 0) for items in engine.bytes_by_role.values())
    monkeypatch.setattr("hotsplit.system.system_memory.free_memory_bytes", lambda: cache)
    _check_memory(model, EngineConfig(context_length=100), 7)
    monkeypatch.setattr("hotsplit.system.system_memory.free_memory_bytes", lambda: cache - 1)
    with pytest.raises(HotsplitError, match="--context"):
        _check_memory(model, EngineConfig(context_length=100), 7)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_text_that_is_over_is_freed_at_once(model, is_cancelled):
    """Its logits, a view of those of a whole step, are freed with it."""
    gc.collect()
    gc.disable()
    try:
        with Engine.load(model, num_sequences=2) as engine:
            left = asyncio.run(asked(engine, is_cancelled=is_cancelled))
            assert {name: ref() for name, ref in left.items()} == dict.fromkeys(left)
    finally:
        gc.enable()


async def asked(engine, *, is_cancelled):
    """Answers a request of two texts, or cancels it; returns weak references to its objects."""
    batches = []
    scheduler = Scheduler(engine, PrefixCache(engine, 2), batches.append, parallel=2, queue=2)
    draws = SamplerChain(SamplingOptions(temperature=0.0), engine.model.spec.vocab_size, None)
    options = GenerationOptions(max_tokens=4, ignores_end=True)
    jobs = [TextJob(ids=[1, 2, 3], codec=engine.codec, draws=draws, options=options)] * 2
    exchange = Exchange(scheduler, jobs, 1, is_stream=False)
    scheduler.step()
    text = exchange.texts[0]
    left = {"text": text, "exchange": exchange, "logits": text.generation._logits_RV}
    assert left["logits"] is not None
    left = {name: weakref.ref(thing) for name, thing in left.items()}
    del text
    if is_cancelled:
        exchange.cancel()
    while not scheduler.is_idle:
        scheduler.step()
    while batches:
        for text, event in batches.pop(0):
            text.listen(text.number, event)
    if not is_cancelled:
        assert [number async for found in exchange.batches() for number, _ in found]
        exchange.cancel()  # as every request does at its end
    return left


RULE = "block=16,sinks=16,window=32,top=32,candidates=2"
SHARED = [(17 * i + 5) % 4000 + 1 for i in range(120)]
PROMPTS = [SHARED + [(i * by + 3) % 4000 + 1 for i in range(40)] for by in (7, 11, 13, 29)]
NUM_TOKENS = 24


def alone(model, rule) -> list[list[int]]:
    """The greedy continuation of each prompt, by an engine of one sequence."""
    found = []
    with Engine.load(model, mode="exact", context_length=CONTEXT, kv_offload=rule) as engine:
        for prompt in PROMPTS:
            with engine.sequence() as text:
                tokens = [*prompt]
                for _ in range(NUM_TOKENS):
                    logits = text.extend(tokens[text.length :])
                    tokens.append(1 + int(logits.flatten()[1:].argmax()))  # token 0 ends a text
            found.append(tokens[len(prompt) :])
    return found


def test_texts_with_a_common_beginning_answer_as_if_alone(model):
    """Every prompt is sent in two rounds, so that the second answers continue from texts that the
    server kept; before each round, a client leaves in the middle of its answer."""
    want = alone(model, RULE)
    assert want != alone(model, None)
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}

    def ask(number):
        return served.ask("/v1/completions", {**body, "prompt": PROMPTS[number]})

    options = ("-np", "3", "--kept", "3", "--mode", "exact", "--kv-offload", RULE)
    with Served(model, *options) as served, ThreadPoolExecutor() as threads:
        texts = [served.ask("/detokenize", {"tokens": tokens})[1]["content"] for tokens in want]
        for _ in range(2):
            leave(served, {**body, "prompt": SHARED, "max_tokens": 100, "stream": True})
            found = list(threads.map(ask, range(4)))
            assert [status for status, _ in found] == [200] * 4, found
            assert [answer["choices"][0]["text"] for _, answer in found] == texts

"""The server's main memory: a cache that does not fit is refused, and a finished text is freed at
once, which is tested with Python's cycle collector off. Other threads run while a long text is
tokenised."""

import asyncio
import gc
import threading
import time
import weakref

import pytest
from serving import TOKENIZER
from tokenizers import Tokenizer

from hotsplit import Engine
from hotsplit.commands.serve import _cache_bytes, _check_memory
from hotsplit.errors import HotsplitError
from hotsplit.options.engine_config import EngineConfig
from hotsplit.runtime.generate.options import GenerationOptions, SamplingOptions
from hotsplit.runtime.generate.sampler_chain import SamplerChain
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.serve.api_error import ApiError
from hotsplit.serve.exchange import Exchange
from hotsplit.serve.prefix_cache import PrefixCache
from hotsplit.serve.scheduler import Scheduler
from hotsplit.serve.served_model import LONG_TEXT, ServedModel
from hotsplit.serve.texts import Job

pytest_plugins = ("serve_fixtures",)
pytestmark = pytest.mark.skipif(not library.is_available(), reason="no C++ kernels")


def test_a_cache_that_does_not_fit_is_refused_before_the_model_is_loaded(model, monkeypatch):
    with Engine.load(model, context_length=100, num_sequences=7) as engine:
        cache = _cache_bytes(engine)
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
    jobs = [Job(ids=[1, 2, 3], codec=engine.codec, draws=draws, options=options)] * 2
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


@pytest.fixture(scope="module")
def served():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    return ServedModel(
        name="a", created=0, codec=TextCodec(tokenizer, None, frozenset()), template="none",
        vocab_size=4096, context_length=256, trained_context_length=256, num_parameters=0,
        num_bytes=0, longest_token=20, defaults=SamplingOptions(), max_tokens=-1,
    )  # fmt: skip


def test_a_long_text_gets_the_codecs_tokens(served):
    for text in ("Hello, world. " * LONG_TEXT, "caf\u00e9 " * LONG_TEXT):
        assert served.encode_plain(text) == served.codec.encode_rendered(text)
        assert served.encode(text) == served.codec.encode(text)
    with pytest.raises(ApiError, match="UTF-8"):
        served.encode("a" * LONG_TEXT + "\ud800")


def test_other_threads_run_while_a_long_text_is_tokenised(served):
    text = "Hello, world. " * (1 << 15)
    ticks, is_over = [], threading.Event()

    def tick():
        while not is_over.wait(0.002):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    served.encode_plain(text)
    ended = time.perf_counter()
    is_over.set()
    thread.join()
    early = [at for at in ticks if began + 0.01 < at < began + 0.6 * (ended - began)]
    assert len(early) >= 3, (ended - began, len(ticks))

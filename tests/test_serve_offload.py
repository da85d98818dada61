"""A server whose texts read selected keys: each answer is as if its text ran alone."""

import threading

import pytest
from serving import CONTEXT, Served, leave, save_model

from hotsplit import Engine
from hotsplit.runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(not library.is_available(), reason="no C++ kernels")
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


def test_texts_with_a_common_beginning_answer_as_if_alone(tmp_path):
    """Every prompt is sent in two rounds, so that the second answers continue from texts that the
    server kept; before each round, a client leaves in the middle of its answer."""
    model = save_model(tmp_path)
    want = alone(model, RULE)
    assert want != alone(model, None)
    served = Served(model, "-np", "3", "--kept", "3", "--mode", "exact", "--kv-offload", RULE)
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}

    def words(tokens):
        return served.ask("/detokenize", {"tokens": tokens})[1]["content"]

    def ask(number, found):
        found[number] = served.ask("/v1/completions", {**body, "prompt": PROMPTS[number]})

    try:
        for _ in range(2):
            leave(served, {**body, "prompt": SHARED, "max_tokens": 100, "stream": True})
            found = {}
            threads = [threading.Thread(target=ask, args=(i, found)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [found[i][0] for i in range(4)] == [200] * 4, found
            texts = [found[i][1]["choices"][0]["text"] for i in range(4)]
            assert texts == [words(tokens) for tokens in want]
    finally:
        served.process.kill()
        served.process.wait()

"""A server whose texts read selected keys: each answer is as if its text ran alone."""

from concurrent.futures import ThreadPoolExecutor

from serving import CONTEXT, Served, leave

from hotsplit import Engine

pytest_plugins = ("serve_fixtures",)
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

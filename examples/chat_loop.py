"""A conversation from Python. Each turn computes only what is new.

python examples/chat_loop.py MODEL [--chat-template chatml] MESSAGE...

MODEL is a model file, such as build/demo/model.gguf, which `make demo` makes."""

import argparse
import sys
from collections.abc import Sequence

from hotsplit import ChatOptions, Engine, GenerationOptions, HotsplitError


def main(argv: Sequence[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("messages", nargs="+")
    parser.add_argument("--chat-template", help="for a model without one, e.g. chatml")
    parser.add_argument("--tokens", type=int, default=48, help="maximum tokens of an answer")
    wanted = parser.parse_args(argv)
    options = ChatOptions(generation=GenerationOptions(max_tokens=wanted.tokens))
    answers = []
    with (
        Engine.load(wanted.model) as engine,
        engine.chat("Be brief.", template=wanted.chat_template, options=options) as conversation,
    ):
        for message in wanted.messages:
            print(f"> {message}")
            tokens = list(conversation.say(message))
            answers.append("".join(token.text for token in tokens if not token.is_reasoning))
            run = conversation.run
            computed = run.prefill_tokens - run.cached_tokens
            print(f"{answers[-1]}\n[{run.cached_tokens} kept, {computed} computed]")
    return answers


if __name__ == "__main__":
    try:
        main()
    except HotsplitError as error:
        sys.exit(str(error))

"""Continue a text, token by token, and say how fast that was.

python examples/generate.py MODEL [--prompt TEXT] [--split PLAN]

MODEL is a model file, such as build/demo/model.gguf, which `make demo` makes."""

import argparse
import sys
from collections.abc import Sequence

from hotsplit import Engine, HotsplitError


def main(argv: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--split", help="a plan, as hotsplit solve writes it")
    parser.add_argument("--prompt", default="def main():")
    parser.add_argument("--tokens", type=int, default=32)
    wanted = parser.parse_args(argv)
    with Engine.load(wanted.model, split=wanted.split) as engine:
        pieces = []
        for token in engine.generate(wanted.prompt, max_tokens=wanted.tokens, temperature=0.0):
            print(token.text, end="", flush=True)
            pieces.append(token.text)
        run = engine.last_run
        print(f"\n[{engine.mode}: {run.decode_per_s:.1f} tokens/s, stopped by {run.stopped_by}]")
    return "".join(pieces)


if __name__ == "__main__":
    try:
        main()
    except HotsplitError as error:
        sys.exit(str(error))

"""Guess the next tokens from the text so far, and check them several at a time.

python examples/speculate.py MODEL [--prompt TEXT]

The text is the same as without guesses, token for token; only the number of steps differs.

MODEL is a model file, such as build/demo/model.gguf, which `make demo` makes."""

import argparse
import sys
from collections.abc import Sequence

from hotsplit import Engine, HotsplitError, NgramDrafter, Speculation, SpeculationOptions

REPEATED = "a = 1\nb = 2\nc = 3\nd = 4\n" * 6


def main(argv: Sequence[str] | None = None) -> tuple[str, str, int]:
    """(text with guesses, text without, right guesses)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", default=REPEATED)
    parser.add_argument("--tokens", type=int, default=48)
    wanted = parser.parse_args(argv)

    with Engine.load(wanted.model) as engine:

        def write(drafts: Speculation | None) -> str:
            made = engine.generate(
                wanted.prompt, max_tokens=wanted.tokens, temperature=0.0, drafts=drafts
            )
            return "".join(token.text for token in made)

        plain = write(None)
        guessed = write(Speculation(NgramDrafter(), SpeculationOptions(type="ngram")))
        run = engine.last_run
    print(guessed)
    if not run.drafted:
        print("[no guesses: nothing to repeat, or longer steps do not pay on this machine]")
    print(
        f"[{run.decode_tokens} tokens in {run.decode_steps} steps; {run.accepted} of"
        f" {run.drafted} guesses were right; same text: {guessed == plain}]"
    )
    return guessed, plain, run.accepted


if __name__ == "__main__":
    try:
        main()
    except HotsplitError as error:
        sys.exit(str(error))

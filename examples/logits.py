"""Score texts: the perplexity of each, from the logits after every token.

python examples/logits.py MODEL TEXT...

MODEL is a model file, such as build/demo/model.gguf, which `make demo` makes."""

import argparse
import math
import sys
from collections.abc import Sequence

import torch

from hotsplit import Engine, HotsplitError


def perplexity(engine: Engine, text: str) -> float:
    """exp of the mean negative log-likelihood of a text's tokens after its first."""
    ids = engine.codec.encode(text)
    if len(ids) < 2:
        raise HotsplitError(f"{text!r} has fewer than two tokens; give a longer text")
    logits_TV = engine.logits(ids)
    log_p_TV = torch.log_softmax(logits_TV[:-1], dim=-1)
    next_T = torch.tensor(ids[1:])
    return math.exp(-log_p_TV.gather(1, next_T[:, None]).mean().item())


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+", help="each of two tokens or more")
    wanted = parser.parse_args(argv)
    with Engine.load(wanted.model) as engine:
        found = [perplexity(engine, text) for text in wanted.texts]
    for text, value in zip(wanted.texts, found, strict=True):
        print(f"{value:10.2f}  {text!r}")
    return found


if __name__ == "__main__":
    try:
        main()
    except HotsplitError as error:
        sys.exit(str(error))

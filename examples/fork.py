"""Texts that share their beginning: compute a prompt once, fork it, and compare the branches.

python examples/fork.py MODEL [--prompt TEXT] BRANCH...

MODEL is a model file, such as build/demo/model.gguf, which `make demo` makes."""

import argparse
import sys
from collections.abc import Sequence

import torch

from hotsplit import Engine, HotsplitError, Part


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("branches", nargs="+", help="continuations to be compared")
    parser.add_argument("--prompt", default="def area(width, height):\n    return")
    wanted = parser.parse_args(argv)
    count = len(wanted.branches)
    with Engine.load(wanted.model, num_sequences=count + 1, context_length=256) as engine:
        encode = engine.codec.encode
        with engine.sequence() as stem:
            after_V = stem.extend(encode(wanted.prompt))[-1]
            ids = [encode(branch) for branch in wanted.branches]
            forks = [stem.fork() for _ in ids]
            parts = [
                Part(sequence=fork, tokens=tokens, wanted="all")
                for fork, tokens in zip(forks, ids, strict=True)
            ]
            rows = engine.run(parts)  # all branches together: each weight is read once a step
    scores = []
    for branch, tokens, logits_TV in zip(wanted.branches, ids, rows, strict=True):
        before_TV = torch.cat([after_V[None], logits_TV[:-1]]).log_softmax(-1)
        scores.append(before_TV[range(len(tokens)), tokens].sum().item())
        print(f"{scores[-1]:10.3f}  {branch!r}")
    return scores


if __name__ == "__main__":
    try:
        main()
    except HotsplitError as error:
        sys.exit(str(error))

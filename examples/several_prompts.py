"""Continue several texts together, in common steps.

python examples/several_prompts.py MODEL PROMPT...

MODEL is a model file, such as build/demo/model.gguf, which `make demo` makes."""

import argparse
import sys
from collections.abc import Sequence

from hotsplit import Engine, GenerationOptions, HotsplitError, SamplingOptions


def main(argv: Sequence[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args(argv)
    texts = [""] * len(wanted.prompts)
    sampling = SamplingOptions(seed=wanted.seed)
    options = GenerationOptions(max_tokens=wanted.tokens)
    with Engine.load(wanted.model, num_sequences=len(texts), context_length=256) as engine:
        for number, token in engine.generate_many(wanted.prompts, sampling, options):
            texts[number] += token.text
    for prompt, text in zip(wanted.prompts, texts, strict=True):
        print(f"== {prompt}{text}")
    return texts


if __name__ == "__main__":
    try:
        main()
    except HotsplitError as error:
        sys.exit(str(error))

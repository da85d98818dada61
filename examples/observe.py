"""Watch a tensor inside a running model: the share of neurons that fire, layer by layer.

python examples/observe.py MODEL [--text TEXT]

runtime/ops/observers.py lists the tensors that can be watched.

MODEL is a model file, such as build/demo/model.gguf, which `make demo` makes."""

import argparse
import sys
from collections.abc import Sequence

from torch import Tensor

from hotsplit import Engine, HotsplitError


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", default="import os\n\ndef main():\n    return 0\n")
    wanted = parser.parse_args(argv)
    density: dict[int, float] = {}

    def watch(name: str, layer: int | None, hidden_TF: Tensor) -> None:
        assert layer is not None
        density[layer] = (hidden_TF != 0).float().mean().item()

    with (
        Engine.load(wanted.model, mode="dense") as engine,
        engine.observe(watch, lambda name, layer: name == "ffn_hidden"),
    ):
        engine.logits(engine.codec.encode(wanted.text))
    for layer, share in density.items():
        print(f"layer {layer:2}: {share:6.1%} {'#' * round(40 * share)}")
    return density


if __name__ == "__main__":
    try:
        main()
    except HotsplitError as error:
        sys.exit(str(error))

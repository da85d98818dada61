"""Child process: checks GPUs by loading a small random model on each, once with all neurons on the
GPU and once with all of them on the CPU."""

import sys

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.random_model import random_model
from hotsplit.doctor.children import leave_no_core, tell_at, tell_done
from hotsplit.families.llama import llama_spec
from hotsplit.families.sizes import Sizes
from hotsplit.model.spec import Rotary

SIZES = Sizes(
    num_layers=2, hidden_size=512, num_neurons=1408, num_heads=8, num_kv_heads=4, head_dim=64,
    vocab_size=1000, context_length=512,
)  # fmt: skip
_RANK = 64


def main() -> None:
    leave_no_core()
    for device in sys.argv[1:]:
        check(device)
    tell_done({})


def check(device: str) -> None:
    """Loads a model twice, which checks the device; hotsplit.artifacts.device_checks stores the results."""
    from hotsplit.runtime.engine import Engine

    model = small_model()
    for cpu_ffn in (False, True):
        where = "the CPU" if cpu_ffn else device
        tell_at(f"a small model on {device}, neurons on {where}")
        with Engine.of(model, mode="predicted", device=device, cpu_ffn=cpu_ffn) as engine:
            engine.decode_seconds(steps=2)


def small_model() -> ModelFile:
    """Random weights in f16, with predictors."""
    spec = llama_spec(SIZES, Rotary(theta=1e4, pairing="adjacent"), "relu")
    return random_model(spec, predictor_rank=_RANK)


if __name__ == "__main__":
    main()

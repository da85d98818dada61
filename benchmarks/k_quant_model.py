"""Benchmarks a K-quant mixture on the CPU against llama.cpp, alternating in one run, dense in both.

    python benchmarks/k_quant_model.py FOLDER --rival path/to/venv/bin/python [--types q4_k_m,mxfp4]

Q4_K_M is a common type of downloaded GGUF files. The model is synthetic: the SiLU twin of 1.1 B
parameters that decode.py makes in FOLDER, which llama.cpp quantises and both sides run as it is. In
the types that `convert` only keeps (mxfp4, iq4_nl, q5_0, q4_1, q5_1), its blocks are random.
What is measured, and how, is described in chat_model.py."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
from chat_model import parser, run
from decode import make_models
from random_checkpoint import TINYLLAMA

from hotsplit.files.gguf_file import TensorEntry, read_gguf, write_gguf

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from small_blocks import CODED, random_rows

KIND = "q4_k_m"
QUANTISE = """
import ctypes, sys, llama_cpp as llama
params = llama.llama_model_quantize_default_params()
params.ftype = llama.LLAMA_FTYPE_MOSTLY_Q4_K_M
source, target = (path.encode() for path in sys.argv[1:])
sys.exit(llama.llama_model_quantize(source, target, ctypes.byref(params)))
"""


def write_random(source: Path, target: Path, kind: str) -> None:
    """The model of `source` with random blocks; matrices of a shape have the same ones."""

    @cache
    def rows(shape: tuple[int, int]) -> np.ndarray:
        return random_rows(kind, *shape, scale=shape[1] ** -0.5)

    def packed(entry: TensorEntry) -> TensorEntry:
        if len(entry.shape) == 1:
            return entry
        data = rows(entry.shape)
        return TensorEntry(shape=entry.shape, kind=kind, read_rows=lambda a, b: data[a:b])

    keys, tensors = read_gguf(source, "model file")
    own = {k: v for k, v in keys.items() if k not in ("general.architecture", "hotsplit.model_id")}
    write_gguf(target, "llama", own, {name: packed(entry) for name, entry in tensors.items()})


def main() -> None:
    options = parser()
    options.set_defaults(types=KIND)
    arguments = options.parse_args()
    for kind in arguments.types.split(","):
        target = arguments.folder / f"{kind}-stock.gguf"
        if target.exists():
            continue
        make_models(arguments.folder, "bf16", TINYLLAMA.num_layers)
        source = arguments.folder / "bf16-stock.gguf"
        made = target.with_suffix(".partial")
        if kind in CODED:
            write_random(source, made, kind)
        else:
            assert kind == KIND, kind
            subprocess.run([arguments.rival, "-c", QUANTISE, str(source), str(made)], check=True)
        made.replace(target)
    model = "synthetic: planted_checkpoint.py, the SiLU twin, quantised by llama.cpp or random"
    run(arguments, "k_quant_model", model, "k-quant-model")


if __name__ == "__main__":
    sys.exit(main())

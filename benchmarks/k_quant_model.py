"""Benchmarks a K-quant mixture on the CPU against llama.cpp, alternating in one run, dense in both.

    python benchmarks/k_quant_model.py FOLDER --rival path/to/venv/bin/python [--types q3_k_m,q2_k,iq4_xs]

Q4_K_M is a common type of downloaded GGUF files. The model is synthetic: the SiLU twin of 1.1 B
parameters that decode.py makes in FOLDER, which llama.cpp quantises and both sides run as it is.
What is measured, and how, is described in chat_model.py."""

import subprocess
import sys

from chat_model import parser, run
from decode import make_models
from random_checkpoint import TINYLLAMA

TYPE = "q4_k_m"  # unless others are asked for
QUANTISE = """
import ctypes, sys, llama_cpp as llama
params = llama.llama_model_quantize_default_params()
params.ftype = getattr(llama, "LLAMA_FTYPE_MOSTLY_" + sys.argv[3].upper())
source, target = (path.encode() for path in sys.argv[1:3])
sys.exit(llama.llama_model_quantize(source, target, ctypes.byref(params)))
"""


def main() -> None:
    found = parser()
    found.set_defaults(types=TYPE)
    arguments = found.parse_args()
    for kind in arguments.types.split(","):
        target = arguments.folder / f"{kind}-stock.gguf"
        if target.exists():
            continue
        make_models(arguments.folder, "bf16", TINYLLAMA.num_layers)
        source = arguments.folder / "bf16-stock.gguf"
        made = target.with_suffix(".partial")
        command = [arguments.rival, "-c", QUANTISE, str(source), str(made), kind]
        subprocess.run(command, check=True)
        made.replace(target)
    model = "synthetic: planted_checkpoint.py, the SiLU twin, quantised by llama.cpp"
    run(arguments, "k_quant_model", model, "k-quant-model")


if __name__ == "__main__":
    sys.exit(main())

"""Benchmarks types of downloaded GGUF files on the CPU against llama.cpp, alternating in one run, dense in both.

    python benchmarks/k_quant_model.py FOLDER --rival path/to/venv/bin/python [--types q3_k_m,iq4_xs,mxfp4]

The model is synthetic: random weights in the shape of 1.1 B parameters, which llama.cpp quantises,
or our `convert` if llama.cpp's quantiser gives that type to experts only. Both sides run the file as
it is; files missing in FOLDER are made first, and nothing is measured in that run. What is measured,
and how, is described in chat_model.py."""

import shutil
import subprocess
import sys
from pathlib import Path

from chat_model import parser, run
from random_checkpoint import TINYLLAMA, make_checkpoint

from hotsplit.convert.convert import ConvertConfig, convert

MODEL = "synthetic: random_checkpoint.py, quantised"
TYPE = "q4_k_m"  # unless others are asked for
OURS = ("mxfp4",)  # quantised by us
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
    paths = [arguments.folder / f"{kind}-stock.gguf" for kind in arguments.types.split(",")]
    missing = [path for path in paths if not path.exists()]
    for path in missing:
        _make(path, arguments.rival)
    if missing:
        return print(f"made {', '.join(map(str, missing))}; run this again to measure")
    return run(arguments, "k_quant_model", MODEL, "k-quant-model")


def _make(target: Path, rival: str) -> None:
    source, kind = target.with_name("bf16-stock.gguf"), target.name.removesuffix("-stock.gguf")
    if not source.exists():
        checkpoint = target.with_name("random")
        make_checkpoint(checkpoint, TINYLLAMA)
        _convert(checkpoint, source, "bf16")
        shutil.rmtree(checkpoint)
    if kind in OURS:
        return _convert(source, target, kind)
    made = target.with_suffix(".partial")
    subprocess.run([rival, "-c", QUANTISE, str(source), str(made), kind], check=True)
    made.replace(target)
    return None


def _convert(source: Path, target: Path, kind: str) -> None:
    convert(ConvertConfig(source=source, output=target, outtype=kind, layout="stock"))


if __name__ == "__main__":
    sys.exit(main())

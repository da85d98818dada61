"""Benchmarks types of downloaded GGUF files on the CPU against llama.cpp, alternating in one run,
dense in both.

    python benchmarks/k_quant_model.py FOLDER --rival path/to/venv/bin/python [--types
    q3_k_m,iq4_xs,mxfp4]

The model is random, of 1.1 B parameters in TinyLlama's shape: all matrices of one type, or of the
types of llama.cpp's mixture. Both sides run the file as it is; files missing in FOLDER are made
first, and nothing is measured in that run. What is measured, and how, is described in
chat_model.py."""

import sys

from chat_model import parser, run
from random_model import make_dense


def main() -> None:
    found = parser()
    found.set_defaults(types="q4_k_m")
    arguments = found.parse_args()
    paths = {kind: arguments.folder / f"{kind}-stock.gguf" for kind in arguments.types.split(",")}
    missing = {kind: path for kind, path in paths.items() if not path.exists()}
    for kind, path in missing.items():
        make_dense(path, kind)
    if missing:
        return print(f"made {', '.join(map(str, missing.values()))}; run this again to measure")
    return run(arguments, "k_quant_model", "random: make_dense in random_model.py", "k-quant-model")


if __name__ == "__main__":
    sys.exit(main())

"""Runs an engine and prints its memory figures as JSON; test_memory runs this in its own process.

python budget_program.py MODEL SPLIT"""

import json
import sys

import torch

from hotsplit import Engine
from hotsplit.errors import HotsplitError


def main(model: str, split: str) -> None:
    torch.cuda.init()
    try:
        with Engine.load(model, split=split, device="cuda") as engine:
            engine.logits(list(range(200)))
            engine.decode_seconds(steps=20, start=200)
            reports = [dict(vars(found)) for found in engine.memory_report()]
            is_refused = False
            try:
                torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                is_refused = True
            peak = torch.cuda.max_memory_reserved()
    except HotsplitError as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"peak": peak, "reports": reports, "more_is_refused": is_refused}))


if __name__ == "__main__":
    main(*sys.argv[1:])

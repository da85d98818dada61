"""The section of gpu_prompts.py about short prompts: how long a pass takes to be launched, how long
in all, and as a graph (runtime/step/captured_passes.py), all of the model on the card in q8_0."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from gpu_model import Planted, write_dense
from gpu_sections import Table

from hotsplit import Engine
from hotsplit.families.sizes import Sizes
from hotsplit.runtime.step.decoder import Decoder

COLUMNS = ("tokens", "launched, ms", "done, ms", "as a graph, ms", "same bits")
TOKENS, ROUNDS = (16, 64, 512), 12


def launches(name: str, sizes: Sizes, device: torch.device, folder: Path) -> list[Table]:
    """`folder`: for the model, which is removed."""
    path = folder / "launches.gguf"
    planted = Planted(sizes=sizes, rank=32, device=device)
    write_dense(planted, path, layout="sparse", kind="q8_0")
    try:
        with Engine.load(path, mode="dense", device=device.type) as engine:
            rows = [_row(engine._live, count) for count in TOKENS if count < sizes.context_length]
    finally:
        path.unlink()
    title = f"a pass of {name}, {sizes.num_layers} layers, all on the card"
    return [Table(title=title, columns=COLUMNS, rows=rows)]


@torch.inference_mode()
def _row(decoder: Decoder, num_tokens: int) -> list[str]:
    ids_T, is_cuda = torch.arange(num_tokens) % 7 + 3, torch.cuda.is_available()
    plain = dataclasses.replace(decoder, captured=None)
    found = []
    for each in (plain, decoder):
        for _ in range(2):  # compiles and captures
            hidden_TD = each.forward(ids_T, 0).cpu()
        found.append((hidden_TD, *_times(lambda each=each: each.forward(ids_T, 0), is_cuda)))
    (want, launched_s, done_s), (got, _, graph_s) = found
    captured = decoder.captured
    is_graph = captured is not None and captured.has_graph(num_tokens)
    row = [str(num_tokens), f"{1e3 * launched_s:.2f}", f"{1e3 * done_s:.2f}"]
    row.append(f"{1e3 * graph_s:.2f}" if is_graph else "not captured")
    return [*row, str(torch.equal(got, want))]


def _times(run: Callable[[], object], is_cuda: bool) -> tuple[float, float]:
    """Median seconds until a pass is launched, and until it is done."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        launched = time.perf_counter()
        if is_cuda:
            torch.cuda.synchronize()
        found.append((launched - began, time.perf_counter() - began))
    return median(each[0] for each in found), median(each[1] for each in found)

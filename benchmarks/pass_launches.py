"""The section of gpu_prompts.py about short prompts: how long a pass takes to be launched by
Python, how long in all, and as the graph that an engine replays, all of the model on the card in
q8_0."""

import time
from pathlib import Path
from statistics import median

import torch
from gpu_model import Planted, write_dense
from gpu_sections import SectionTable
from torch import Tensor

from hotsplit import Engine
from hotsplit.families.decoder_sizes import Sizes
from hotsplit.runtime.kernels.gpu.kernels import reference_kernels
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step import hybrid_builder
from hotsplit.runtime.step.backend import plain_backend
from hotsplit.runtime.step.batch import rows_of
from hotsplit.runtime.step.hybrid_step import HybridStep
from hotsplit.runtime.step.pass_device import PassSetup

COLUMNS = ("tokens", "launched, ms", "done, ms", "as a graph, ms", "same bits")
TOKENS, ROUNDS = (16, 64, 512), 12


def launches(name: str, sizes: Sizes, device: torch.device, folder: Path) -> list[SectionTable]:
    """`folder`: for the model, which is removed."""
    path = folder / "launches.gguf"
    planted = Planted(sizes=sizes, rank=32, device=device)
    write_dense(planted, path, layout="sparse", kind="q8_0")
    counts = [count for count in TOKENS if count < sizes.context_length]
    found = []
    try:
        for graph in (False, True):
            with Engine.load(path, mode="dense", device=device.type, graph=graph) as engine:
                step = _step(engine)
                found.append([_measured(step, count) for count in counts])
    finally:
        path.unlink()
    rows = []
    for count, one, other in zip(counts, *found, strict=True):
        (want_V, *seconds), (got_V, _, graph_s) = one, other
        times = [f"{1e3 * each:.2f}" for each in (*seconds, graph_s)]
        rows.append([str(count), *times, str(torch.equal(got_V, want_V))])
    title = f"a pass of {name}, {sizes.num_layers} layers, all on the card"
    return [SectionTable(title=title, columns=COLUMNS, rows=rows)]


def _step(engine: Engine) -> HybridStep:
    """The engine's step; without a card, one with a GPU's role on the CPU."""
    found, weights = engine._live.native, engine._live.weights
    if isinstance(found, HybridStep):
        return found
    return hybrid_builder.build(
        weights,
        Placement.on_one_device(len(weights.layers), torch.device("cpu")),
        engine.traffic,
        plain_backend(reference_kernels()),
        passes=PassSetup(num_rows=TOKENS[-1]),
    )


def _measured(step: HybridStep, num_tokens: int) -> tuple[Tensor, float, float]:
    """Logits f32 [V] after a prompt, and median seconds of a pass: submitted, and done."""
    rows = rows_of([7 + number % 11 for number in range(num_tokens)], 0, "last")
    for _ in range(2):  # compiles and captures
        logits_V = step.run_pass(rows)[0].clone()
    length = next(each for each in step.passes.lengths if each >= num_tokens)
    segments, times = step.segments["pass", length], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for segment in segments:  # one, as there is one device
            segment.main.follow()
            segment.run()
        submitted = time.perf_counter()
        step._finish(segments)
        times.append((submitted - began, time.perf_counter() - began))
    return logits_V, median(each[0] for each in times), median(each[1] for each in times)

"""llama.cpp's candidates for a chain of samplers, and their differences from ours."""

import json
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from paths import ROOT

from hotsplit.options.generation_options import SamplingOptions
from hotsplit.runtime.generate.candidates import Candidates
from hotsplit.runtime.generate.sampler_chain import SamplerChain

PYTHON = ROOT / "build/llamacpp-venv/bin/python"
DRAW = ["dist", 1]


@dataclass
class Case:
    """A chain of samplers in two forms, as llama.cpp's calls (without the final draw) and as our
    options, with the logits and the history that it gets."""

    chain: list[list]
    options: SamplingOptions
    logits: np.ndarray
    history: list[int] = field(default_factory=list)


def ask(tmp_path: Path, cases: list[Case], *, ends: list | None = DRAW, model: str = "") -> dict:
    inputs, output = tmp_path / "inputs.npz", tmp_path / "output.npz"
    np.savez(inputs, **{str(number): case.logits for number, case in enumerate(cases)})
    request = {
        "model": model,
        "inputs": str(inputs),
        "output": str(output),
        "cases": [
            {"chain": c.chain + ([ends] if ends else []), "history": c.history} for c in cases
        ],
    }
    done = subprocess.run(
        [PYTHON, ROOT / "tests/llamacpp/sampler_oracle.py"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(output) as found:
        return dict(found)


def difference(
    step_V: np.ndarray, ours: Candidates, ids: np.ndarray, p: np.ndarray, tolerance: float = 1e-5
) -> str:
    """The difference between our candidates and llama.cpp's ids and probabilities; '' if none. If
    logits tie, the ids may differ."""
    there = {int(i): float(q) for i, q in zip(ids, p, strict=True) if q > 1e-30}
    here = {
        int(i): float(q) for i, q in zip(ours.ids_A, ours.probability_A, strict=True) if q > 1e-30
    }
    if len(there) != len(here):
        return f"{len(here)} candidates, llama.cpp {len(there)}"
    worst = np.abs(np.sort(list(here.values())) - np.sort(list(there.values()))).max()
    if worst > tolerance:
        return f"probabilities {worst} apart"
    has_ties = len(np.unique(step_V)) < len(step_V)
    if not has_ties and here.keys() != there.keys():
        return f"other tokens: {sorted(here.keys() ^ there.keys())[:6]}"
    return ""


def differences(tmp_path: Path, cases: list[Case], **more) -> list:
    """(number, difference, case) of the cases that differ by more than rounding (see is_rounding).
    Asserts that at most one case in fifty differs by rounding."""
    found = ask(tmp_path, cases, **more)
    wrong, num_rounded = [], 0
    for number, case in enumerate(cases):
        theirs = found[f"{number}.0.ids"], found[f"{number}.0.p"]
        why = difference(case.logits, distribution(case), *theirs)
        if not why:
            continue
        if is_rounding(case, *theirs):
            num_rounded += 1
        else:
            wrong.append((number, why, case))
    assert num_rounded <= 0.02 * len(cases), num_rounded
    return wrong


def is_rounding(case: Case, ids: np.ndarray, p: np.ndarray) -> bool:
    """True if a threshold higher or lower by a share of 2e-5 gives llama.cpp's candidates; or, with
    typical-p, if the candidates differ in one or two tokens, whatever their probabilities: one may
    have taken the place of another that is about as typical."""
    if any(not difference(case.logits, distribution(other), ids, p) for other in near(case)):
        return True
    swapped = set(distribution(case).ids_A.tolist()) ^ set(ids[p > 1e-30].tolist())
    return case.options.typ_p < 1 and 0 < len(swapped) <= 2


def near(case: Case) -> list[Case]:
    thresholds = ("top_p", "typ_p", "min_p", "xtc_threshold")
    return [
        replace(case, options=replace(case.options, **{name: value * factor}))
        for name in thresholds
        if 0 < (value := getattr(case.options, name)) < 1
        for factor in (1 - 2e-5, 1 + 2e-5)
    ]


def distribution(case: Case) -> Candidates:
    chain = SamplerChain(case.options, len(case.logits), {})
    return chain.distribution(torch.from_numpy(case.logits), case.history)

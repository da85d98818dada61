"""Measures what rules without training cost a model: KL from its dense self against bytes not read.

    python benchmarks/rules.py build/smollm2/f16.gguf build/smollm2/q8_0.gguf \\
        --tune train.txt --check held-out.txt

Each type is compared with its own dense self, on held-out text. Shares are of all weight bytes that
a token reads, the head included. Rules:

    cats     one threshold per layer on |act(gate)|, the same share in every layer (arXiv
             2404.08763)
    gates    neurons, by the contribution expected from |act(gate_j)|, a share for each layer
             (profile/sparsity/limit_search.py)

Every measurement is saved to the JSON at once, so an interrupted run can resume."""

import argparse
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine, processor, slug

from hotsplit import Engine
from hotsplit.artifacts.limits_file import LayerLimits
from hotsplit.files.atomic import partial_file
from hotsplit.profile.corpus.corpus import read_windows
from hotsplit.profile.sparsity.limit_meter import LimitMeter
from hotsplit.profile.sparsity.limit_scores import LayerScores, sample_scores
from hotsplit.profile.sparsity.limit_search import Allocation, Bytes, allocate
from hotsplit.profile.sparsity.thresholds import up_to

ROOT = Path(__file__).resolve().parent.parent
RULES = ("cats", "gates")
SHARES = (0.08, 0.12, 0.16, 0.20, 0.23, 0.28)
SCORE_TOKENS, PROBE_TOKENS = 2048, 512


def main() -> None:
    arguments = _arguments()
    output = arguments.output or ROOT / f"benchmarks/results/rules-{slug(processor())}.json"
    result: dict[str, Any] = {"types": {}}
    if output.exists():
        result = json.loads(output.read_text())
    result |= {"machine": machine(), "rules": list(RULES), "shares": list(SHARES)}
    for path in arguments.models:
        _measure_type(path, arguments, result, output)
    if arguments.plot:
        _draw(result, arguments.plot)


def _measure_type(path: Path, arguments: argparse.Namespace, result: Any, output: Path) -> None:
    with Engine.load(path, mode="exact", device="cpu") as engine:
        kind = engine.model.tensors["blk.0.attn_output.weight"].kind
        tune, check = (
            read_windows([text], engine.codec, context_length=512, max_tokens=count, seed=0)
            for text, count in ((arguments.tune, 16_384), (arguments.check, arguments.tokens))
        )
        sha256 = hashlib.sha256(arguments.check.read_bytes()).hexdigest()
        known = result["types"].setdefault(kind, {"points": []})
        known |= {"tokens": check.num_tokens, "text": arguments.check.name, "sha256": sha256}
        todo = [
            (rule, share)
            for rule in arguments.rules
            for share in SHARES
            if (rule, share) not in {(p["rule"], p["share"]) for p in known["points"]}
        ]
        if not todo:
            return
        with Engine.load(path, mode="dense", device="cpu", is_resident=False) as dense:
            scores = sample_scores(dense, up_to(tune.ids, SCORE_TOKENS))
        probe = LimitMeter(engine, up_to(tune.ids, PROBE_TOKENS))
        bytes_of = Bytes.of(engine.model)
        allocation = allocate(scores, bytes_of, probe.kl)
        del probe
        meter = LimitMeter(engine, check.ids)
        for rule, share in todo:
            found = _limits(rule, share, scores, allocation, bytes_of)
            if found is None:
                continue
            limits_L, saved, choice = found
            close = meter.measure(limits_L)
            point = {"rule": rule, "share": share, "saved_share": saved, "choice": choice}
            known["points"].append(point | asdict(close))
            print(f"{kind} {rule} {share:.0%} (saved {saved:.1%}): KL {close.kl:.4f} +-"
                  f" {close.kl_error:.4f}, perplexity {close.perplexity_increase:+.2%}", flush=True)  # fmt: skip
            with partial_file(output) as partial:
                partial.write_text(json.dumps(result, indent=1) + "\n")


def _limits(
    rule: str,
    share: float,
    scores: tuple[LayerScores, ...],
    allocation: Allocation,
    bytes_of: Bytes,
) -> tuple[tuple[LayerLimits, ...], float, Any] | None:
    """Limits, the share of the bytes that they save, and the mean share of silent neurons.

    None if the rule cannot save that much."""
    if rule == "cats":
        neurons = share * bytes_of.total / float(bytes_of.saved_L.sum())
        if neurons >= 1:
            return None
        return tuple(s.uniform_gate(neurons) for s in scores), share, {"gate": neurons}
    choice = allocation.best(share)
    if choice is None:
        return None
    means = {"gate": float(np.mean(choice.share_L))}
    return choice.limits(scores, None).layers, choice.saved_share, means


def _draw(result: dict[str, Any], path: Path) -> None:
    """KL by saved share: a panel per type, a line per rule."""
    from hotsplit.profile.report.plots import load_pyplot

    pyplot = load_pyplot()
    kinds = [kind for kind in result["types"] if result["types"][kind]["points"]]
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(5 * len(kinds), 4), sharey=True,
                                   squeeze=False, layout="constrained")  # fmt: skip
    for panel, kind in zip(axes[0], kinds, strict=True):
        for rule in RULES:
            points = [p for p in result["types"][kind]["points"] if p["rule"] == rule]
            points.sort(key=lambda p: p["saved_share"])
            if points:
                panel.errorbar([100 * p["saved_share"] for p in points], [p["kl"] for p in points],
                               yerr=[p["kl_error"] for p in points], marker="o", markersize=3,
                               label=rule)  # fmt: skip
        panel.set(xlabel="weight bytes not read, %", title=kind, yscale="log")
        panel.legend()
    axes[0][0].set_ylabel("KL from the dense model, nats a token")
    with partial_file(path) as partial:
        figure.savefig(partial, format="png", dpi=110)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tune", type=Path, required=True, help="text that limits are chosen on")
    parser.add_argument("--check", type=Path, required=True, help="held-out text, to measure on")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

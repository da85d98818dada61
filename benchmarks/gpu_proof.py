"""Executes every variant of the kernel launches of several plans as PTX, plants faults, and writes
the results.

    python benchmarks/gpu_proof.py [--only plans|faults]

Needs no GPU: Triton compiles for devices that are absent, and tests/ptx executes the PTX.
Takes about half an hour. Writes benchmarks/results/gpu-proof.json, from which `make tables` fills
the tables of docs/gpu-proof.md; with --only, the other half of the file stays as it is."""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault(
    "TRITON_INTERPRET", "1"
)  # this process interprets kernels, a child compiles them
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

RESULT = ROOT / "benchmarks" / "results" / "gpu-proof.json"
ARCHITECTURES = (89, 120)
CONTEXT = 512
_KINDS = ("f32", "f16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
# By name: (model, type of the weights, mode, kind of predictors).
PLANS = {
    **{
        f"{model}, {kind}, {mode}": (model, kind, mode, "")
        for model in ("tiny-relu", "tiny-silu")
        for kind in ("f16", "q8_0", "q4_0")
        for mode in ("dense", "exact")
    },
    **{
        f"tiny-relu, {kind}, predicted ({predictor})": ("tiny-relu", kind, "predicted", predictor)
        for kind in ("f16", "q8_0", "q4_0")
        for predictor in ("linear", "relu")
    },
    "tiny-silu, f16, predicted (gate)": ("tiny-silu", "f16", "predicted", "gate"),
    "tiny-silu, q4_0, predicted (gate)": ("tiny-silu", "q4_0", "predicted", "gate"),
    **{
        f"SmolLM2, {kind}, {mode}": ("SmolLM2", kind, mode, "")
        for kind in ("f16", "q8_0", "q4_0")
        for mode in ("dense", "exact")
    },
    **{f"7B, {kind}, exact": ("7B", kind, "exact", "") for kind in _KINDS},
    **{f"7B, {kind}, predicted": ("7B", kind, "predicted", "linear") for kind in _KINDS},
}  # fmt: skip


def launches_of_plan(name: str, folder: Path) -> tuple:
    """The launches of a plan; empty if the model is missing."""
    import ptx_plans

    whose, kind, mode, predictor = PLANS[name]
    model = _model(whose, kind, folder)
    if model is None:
        return ()
    rank = 1024 if whose == "7B" else 40 if kind == "f16" else 64
    if whose == "7B":
        model = ptx_plans.like(model, kind=kind, rank=rank if predictor else 0)
    elif predictor:
        model = ptx_plans.like(model, kind=kind, rank=rank, predictor=predictor)
    return ptx_plans.launches(model, mode=mode, context=CONTEXT)


def _model(whose: str, kind: str, folder: Path):
    from models import make_sizes, shape_only

    from hotsplit.artifacts.model_file import ModelFile
    from hotsplit.convert.convert import convert
    from hotsplit.convert.options import ConvertConfig

    if whose == "7B":  # its width and heads, with fewer layers and neurons and a smaller vocabulary
        return shape_only(
            make_sizes(num_layers=3, width=4096, num_neurons=2560, num_heads=32, num_kv_heads=32,
                       vocab_size=4096, context_length=4096)
        )  # fmt: skip
    if whose == "SmolLM2":
        path = ROOT / "build" / "smollm2" / f"{kind}.gguf"
        return ModelFile.load(path) if path.exists() else None
    path = folder / f"{whose}-{kind}.gguf"
    if not path.exists():
        convert(ConvertConfig(source=ROOT / "examples" / whose, output=path, outtype=kind))
    return ModelFile.load(path)


def execute_plans() -> dict:
    """{"plans": number of variants by plan, "kernels": number of variants by kernel, "variants":
    their total, "instructions": number executed, by architecture and opcode}."""
    import ptx_plans
    from ptx.kernels import PtxKernels

    from hotsplit.runtime.kernels.gpu import launch

    launch.LEAST_PROGRAMS = 512
    machines = {arch: PtxKernels(arch) for arch in ARCHITECTURES}
    done: set[str] = set()
    kernels: Counter = Counter()
    plans = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PLANS:
            found = launches_of_plan(name, Path(folder))
            assert found, f"{name}: its model is missing: run make smollm2"
            plans[name] = len(found)
            new = [each for each in found if each.variant not in done]
            print(f"{name}: {len(found)} variants, {len(new)} new", flush=True)
            for each in new:
                for machine in machines.values():
                    ptx_plans.assert_right(each, machine.kernels)
                done.add(each.variant)
                kernels[each.kernel] += 1
    return {
        "plans": plans,
        "kernels": dict(sorted(kernels.items())),
        "variants": len(done),
        "instructions": {
            f"sm_{arch}": dict(sorted(machine.num_lane_instructions.items()))
            for arch, machine in machines.items()
        },
    }


def plant_faults() -> dict:
    """{"faults": what and where each is, what detected it, and the reason if nothing did,
    "barriers": for each kernel, removed barriers counted by what detected them}."""
    from ptx_mutants import BARRIERS, MUTANTS, outcome, without_each_barrier

    from hotsplit.runtime.kernels.gpu import launch

    launch.LEAST_PROGRAMS = 1
    faults = []
    for mutant in MUTANTS:
        found = outcome(mutant)
        print(f"{mutant.what}: {found}", flush=True)
        place = mutant.place if mutant.place.endswith(".py") else f"PTX of {mutant.place}"
        faults.append(
            {"fault": mutant.what, "place": place, "found_by": found, "reason": mutant.reason}
        )
    barriers = {}
    for kernel, case in BARRIERS:
        mutants = without_each_barrier(kernel, case)
        barriers[kernel] = Counter(outcome(mutant) for mutant in mutants)
        print(kernel, barriers[kernel], flush=True)
    return {"faults": faults, "barriers": barriers}


def write(part: dict) -> None:
    """Replaces these keys of the results file; the others stay."""
    whole = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps(whole | part, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("plans", "faults"))
    only = parser.parse_args().only
    if only != "plans":
        write(plant_faults())
    if only != "faults":
        write(execute_plans())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""What `plan` says of llama.cpp's speed, beside published measurements.

    python benchmarks/public_cells.py FILE [-o OUT.json] [--table]

FILE has an object a line: engine, model, gguf_type, file_gb, card, cpu, threads, ram, options,
context_or_depth, decode_tok_s, prompt_tok_s, prompt_length. A row is predicted if its engine is
llama.cpp, its model, type, card and processor are known here, and its options say what is where;
the others are counted by why they are not. Models are the headers of tests/families, in the type's
usual mixture, scaled to the file's size if the row has it.

A processor's memory, where a row does not say it, is that which the maker names for it with two
modules. Rows that their own source calls outliers, or that contradict their neighbours, are in
LEFT_OUT with the reason."""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/families"))
from published_headers import HEADERS, Header, keys_of, tensors_of, write

from hotsplit.artifacts import data_sheets
from hotsplit.artifacts.machine_file import Figure, Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.options.cache_types import CacheTypes
from hotsplit.solver.assumed import every_neuron
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.llamacpp_speed import BATCH, Division, prompt_seconds, step_seconds

LEFT_OUT = {
    "c064": "the number of layers with experts on the CPU is not stated",
    "c075": "the card is overfilled (8.5 tokens/s; 22.0 with one layer less)",
    "c135": "-fa with q8_0 keys on the CPU in a build that had no kernel for it: 9.1, 16.4 without",
    "c173": "the file is larger than main memory",
    "c234": "the source calls it an outlier; the file is as large as main memory",
    "c254": "the prompt's rate of 960 tokens/s contradicts its decode (WSL 2)",
}
# Card: its name in data_sheets, or what that does not have.
CARDS = {
    "RTX 2060 SUPER": "rtx-2060-super-8gb",
    "RTX 2060 mobile": "rtx-2060-6gb",
    "RTX 2070 SUPER": "rtx-2070-super-8gb",
    "RTX 2080": "rtx-2080-8gb",
    "RTX 3060": "rtx-3060-12gb",
    "2 x RTX 3060": "rtx-3060-12gb",
    "RTX 3070": "rtx-3070-8gb",
    "RTX 3070 Ti": "rtx-3070-ti-8gb",
    "RTX 3080": "rtx-3080-10gb",
    "RTX 3090": "rtx-3090-24gb",
    "RTX 4060 Ti": "rtx-4060-ti-8gb",
    "RTX 4070": "rtx-4070-12gb",
    "RTX 4080": "rtx-4080-16gb",
    "RTX 4090": "rtx-4090-24gb",
    "RTX 5060 Ti": "rtx-5060-ti-16gb",
    "RTX 5070": "rtx-5070-12gb",
    "RTX 5070 Ti": "rtx-5070-ti-16gb",
    "RTX 5080": "rtx-5080-16gb",
    "RTX 5090": "rtx-5090-32gb",
}
MORE_CARDS = {
    "GTX 1070": ("gtx-1070", 256.0, "3x16"),
    "GTX 1080": ("gtx-1080", 320.0, "3x16"),
    "RTX A1000": ("rtx-a1000", 192.0, "4x8"),
}
# Processor: its cores, and main memory as in data_sheets, or the GB/s that four channels reach.
FOUR_CHANNELS = 0.45
PROCESSORS: dict[str, tuple[int, str | float]] = {
    "i5-10400F": (6, "ddr4-2666"),
    "i5-12400F": (6, "ddr5-5600"),
    "i5-12600K": (10, "ddr5-5600"),
    "i7-8086K": (6, "ddr4-2666"),
    "i7-10750H": (6, "ddr4-2933"),
    "i9-9900T": (8, "ddr4-2666"),
    "i9-10900X": (10, FOUR_CHANNELS * 102.4),
    "i9-13900HK": (14, "ddr5-5200"),
    "i9-14900K": (24, "ddr5-5600"),
    "Ryzen 5 5600 ": (6, "ddr4-3200"),
    "5950X": (16, "ddr4-3200"),
    "Ryzen 9 7900 ": (12, "ddr5-5200"),
    "7950X": (16, "ddr5-5200"),
    "9700X": (8, "ddr5-5600"),
    "9900X": (12, "ddr5-5600"),
    "9950X": (16, "ddr5-5600"),
    "5975WX": (32, FOUR_CHANNELS * 102.4),
}
_BY_NAME = {header.name: header for header in HEADERS}


def _like(name: str, **changes: Any) -> Header:
    return replace(_BY_NAME[name], **changes)


_QWEN25, _QWEN3 = "Qwen2.5-32B-Instruct-IQ2_XXS", "Qwen3-8B-Q4_K_M"
# Beginning of a model's name, in lower case: its header; the longest that fits counts.
MODELS = {
    "qwen2.5-coder-7b": _like("Qwen2.5-7B-Instruct-Q4_K_M"),
    "qwen2.5-coder-14b": _like(_QWEN25, sizes=(48, 5120, 13824, 40, 8, 128, 152064)),
    "qwen2.5-14b": _like(_QWEN25, sizes=(48, 5120, 13824, 40, 8, 128, 152064)),
    "qwen2.5-coder-32b": _like(_QWEN25),
    "qwen3-4b": _like(
        _QWEN3, sizes=(36, 2560, 9728, 32, 8, 128, 151936), marks="head_norms long tied"
    ),
    "qwen3-8b": _like(_QWEN3),
    "qwen3-14b": _like(_QWEN3, sizes=(40, 5120, 17408, 40, 8, 128, 151936)),
    "qwen3-32b": _like(_QWEN3, sizes=(64, 5120, 25600, 64, 8, 128, 151936)),
    "qwen3-30b-a3b": _like("Qwen3-30B-A3B-Q4_K_M"),
    "qwen3-coder-30b-a3b": _like("Qwen3-30B-A3B-Q4_K_M"),
    "qwen3-vl-30b-a3b": _like("Qwen3-30B-A3B-Q4_K_M"),
    "qwen3-235b-a22b": _like("Qwen3-235B-A22B-Q4_K_M"),
    "qwen3.5-35b-a3b": _like("Qwen3.6-35B-A3B-Q4_K_M"),
    "qwen3.6-35b-a3b": _like("Qwen3.6-35B-A3B-Q4_K_M"),
    "qwen3.6-27b": _like("Qwen3.8-27B-UD-Q2_K_XL"),
    "llama-3-8b": _like("Llama-3.1-8B-Instruct-Q4_K_M"),
    "llama-3.1-8b": _like("Llama-3.1-8B-Instruct-Q4_K_M"),
    "meta-llama-3.1-8b": _like("Llama-3.1-8B-Instruct-Q4_K_M"),
    "mistral-small-24b": _like("Mistral-Small-24B-IQ3_XXS"),
    "gemma-2-9b": _like("gemma-2-9b-it-Q4_K_M"),
    "gemma-3-12b": _like("gemma-3-12b-it-Q4_K_M"),
    "gemma-3-27b": _like("gemma-3-27b-it-Q4_0"),
    "gpt-oss-20b": _like("gpt-oss-20b-MXFP4"),
    "gpt-oss-120b": _like(
        "gpt-oss-20b-MXFP4", sizes=(36, 2880, 2880, 64, 8, 64, 201088), experts=(128, 4, 2880, 0, 0)
    ),
    "glm-4.5-air": _like("GLM-4.5-Air-Q4_K_M"),
    "deepseek-coder-v2-lite": _like("DeepSeek-V2-Lite-Chat-Q4_K_M"),
}
# Part of a type's name, in lower case: the mixture; the first that fits counts.
KINDS = {
    "mxfp4": "mxfp4",
    "iq4_xs": "iq4_xs",
    "iq3": "iq3_xxs",
    "iq2": "iq2_xxs",
    "q8": "q8_0",
    "q6_k": "q6_k",
    "q5_k": "q5_k_m",
    "q4_0": "q4_0",
    "q4_k": "q4_k_m",
    "q3_k": "q3_k_m",
    "q2_k": "q3_k_m",
    "bf16": "bf16",
    "f16": "f16",
}


class Unknown(Exception):
    """Why a row is not predicted."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A row, predicted; times in tokens a second."""

    id: str
    model: str
    kind: str
    card: str
    cpu: str
    options: str
    depth: int
    decode: float | None
    decode_predicted: float
    prompt: float | None
    prompt_length: int | None
    prompt_predicted: float | None


def header_of(row: dict[str, Any]) -> tuple[str, str]:
    """The key in MODELS, and the mixture of types."""
    name = row["model"].lower()
    fitting = [start for start in MODELS if name.startswith(start)]
    kind = next((own for part, own in KINDS.items() if part in str(row["gguf_type"]).lower()), None)
    if not fitting:
        raise Unknown("a model without a header here")
    if kind is None:
        raise Unknown("a type that llama.cpp does not have, or none")
    name = max(fitting, key=len)
    return name, "mxfp4" if MODELS[name].architecture == "gpt-oss" else kind


def machine_of(row: dict[str, Any], scale: float) -> Machine:
    """Figures of the row's machine; rates are of bytes `scale` times as large as the header's."""
    card, cpu, ram = row["card"], f"{row['cpu'] or ''} ", (row["ram"] or "").lower()
    found = data_sheets.machine_of("rtx-3060-12gb")
    if card in MORE_CARDS:
        name, gb_per_s, link = MORE_CARDS[card]
        gpu = replace(
            found.gpus[0],
            name=name,
            bandwidth_gb_per_s=Figure(best=data_sheets.GPU_SHARE * gb_per_s),
            host_to_device_gb_per_s=Figure(best=data_sheets.LINKS[link]),
        )
        found = replace(found, gpus=(gpu,))
    elif card is not None:
        if card not in CARDS:
            raise Unknown("a card that is not NVIDIA's, or not named")
        found = data_sheets.machine_of(CARDS[card])
    known = next((PROCESSORS[name] for name in PROCESSORS if name in cpu), None)
    rate, cores = 0.0, row["threads"] or 8
    if known is not None:
        cores, host = min(cores, known[0]) if row["threads"] else known[0], known[1]
        rate = host if isinstance(host, float) else data_sheets.host_rate(_host(host, ram))
    rate /= scale
    gpu = found.gpus[0]
    gpu = replace(gpu, bandwidth_gb_per_s=Figure(best=gpu.bandwidth_gb_per_s.median / scale))
    return replace(
        found,
        num_threads=cores,
        cpu_bandwidth_gb_per_s={cores: Figure(best=rate or 1e-9)},
        gpus=(gpu,),
    )


def _host(host: str, ram: str) -> str:
    """Main memory by the row's own words, else the processor's."""
    if (stated := re.search(r"ddr([45])-(\d{4})", ram)) is not None:
        host = stated[0]
    if "single channel" in ram:
        return f"{host}x1"
    return f"{host}x4" if re.search(r"\b4 x \d+ gb", ram) else host


def division_of(row: dict[str, Any], model: ModelFile) -> Division:
    text, num_layers = row["options"] or "", model.spec.num_layers
    moe = re.search(r"n[-_]?cpu[-_]moe (\d+)|ncmoe (\d+)", text)
    ngl = re.search(r"-ngl (\d+)", text)
    lower = text.lower()
    kinds = re.findall(r"-ct[kv] (\w+)", text) or re.findall(r"KV (q\d_\d)", text)
    cache = CacheTypes.of(*(kinds if len(kinds) == 2 else kinds[:1] or ["f16"]))
    if "cpu only" in lower or "--device none" in lower:
        return Division(homes=(None,) * num_layers, cache=cache)
    cold = int(next(filter(None, moe.groups()))) if moe else 0
    if re.search(r"exps(\.weight)?=CPU|experts on CPU", text):
        cold = num_layers
    elif "=CPU" in text:
        found = re.search(r"last (\d+) of", text)
        if found is None:
            raise Unknown("an -ot that is not read here")
        cold = int(found[1])
    if not moe and ngl is None and not cold and "whole" not in lower:
        raise Unknown("options that do not say what is where")
    there = int(ngl[1]) if ngl else num_layers + 1
    # llama.cpp counts the output matrix first.
    first = num_layers - min(num_layers, max(0, there if cold else there - 1))
    homes = (None,) * first + (0,) * (num_layers - first)
    layers = model.spec.layers
    return Division(
        homes=homes,
        cold=tuple(n for n in range(first, min(cold, num_layers)) if layers[n].route is not None),
        head=0 if there else None,
        cache=cache,
    )


def depth_of(row: dict[str, Any]) -> int:
    text = row["context_or_depth"] or ""
    if found := re.search(r"N_KV (\d+)|d=(\d+)|(\d+)-token prompt", text):
        return int(next(filter(None, found.groups())))
    if found := re.search(r"about (\d+)k tokens in KV", text):
        return 1000 * int(found[1])
    return 0


def predicted(rows: list[dict[str, Any]]) -> tuple[list[Cell], Counter[str]]:
    cells, models = [], dict[tuple[str, str], ModelFile]()
    skipped = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            try:
                cells.append(_cell(row, models, Path(folder)))
            except Unknown as why:
                skipped[str(why)] += 1
    return cells, skipped


def _cell(row: dict[str, Any], models: dict[tuple[str, str], ModelFile], folder: Path) -> Cell:
    if row["engine"] != "llama.cpp":
        raise Unknown("another engine")
    if row["id"] in LEFT_OUT:
        raise Unknown(f"{row['id']}: {LEFT_OUT[row['id']]}")
    name, kind = found = header_of(row)
    if found not in models:
        header, path = replace(MODELS[name], kind=kind), folder / f"{len(models)}.gguf"
        write(path, keys_of(header), list(tensors_of(header)))
        models[found] = ModelFile.of(path, *read_model_gguf(path))
    model = models[found]
    size = sum(entry.num_bytes for entry in model.tensors.values())
    scale = row["file_gb"] * 1e9 / size if row["file_gb"] else 1.0
    division = division_of(row, model)
    machine = machine_of(row, scale)
    uses_cpu = None in division.homes or bool(division.cold)
    if uses_cpu and machine.best_cpu_bandwidth_gb_per_s < 1e-6:
        raise Unknown("a processor that is not named, or not known here")
    depth = depth_of(row)
    inputs = Inputs(
        model=model,
        profile=every_neuron(model),
        machine=machine,
        paths=(Path(row["id"]), None, Path(row["id"])),
        context_length=max(1, 2 * depth),
        mode="dense",
        workspace=0,
        budgets=(int(row["card"] is not None),),
        host_budget=1 << 40,
    )
    length = row["prompt_length"]
    batch = re.search(r"-ub (\d+)", row["options"] or "")
    seconds = None
    if length and row["prompt_tok_s"]:
        threads = re.search(r"(\d+) for prompt", row["options"] or "")
        rated = replace(machine, num_threads=int(threads[1])) if threads else machine
        seconds = prompt_seconds(
            replace(inputs, machine=rated),
            division,
            int(length),
            batch=int(batch[1]) if batch else BATCH,
            depth=depth if depth != length and "tokens in KV" not in row["context_or_depth"] else 0,
        )
    return Cell(
        id=row["id"],
        model=row["model"],
        kind=str(row["gguf_type"]),
        card=row["card"] or "-",
        cpu=row["cpu"] or "-",
        options=row["options"] or "",
        depth=depth,
        decode=row["decode_tok_s"],
        decode_predicted=1 / step_seconds(inputs, division),
        prompt=row["prompt_tok_s"],
        prompt_length=length and int(length),
        prompt_predicted=None if seconds is None else int(length) / seconds,
    )


def errors(pairs: Iterator[tuple[float | None, float | None]]) -> np.ndarray:
    """Natural logarithms of measured over predicted."""
    return np.log([told / own for told, own in pairs if told and own])


def line_of(cell: Cell) -> str:
    words = [cell.id, cell.model[:24], cell.kind[:12], cell.card[:14], cell.cpu[:24]]
    words.append(cell.options[:40])
    for told, own in ((cell.decode, cell.decode_predicted), (cell.prompt, cell.prompt_predicted)):
        words.append(f"{told:.1f} {own:.1f} {told / own:.2f}" if told and own else "-")
    return " | ".join(words)


def table_row(cell: Cell) -> str:
    """A row of docs/plan.md: published and predicted tokens a second."""
    where = re.sub(r" \(.*|Intel (Core )?|AMD ", "", cell.cpu)
    what = re.findall(
        r"-ngl \d+|-ncmoe \d+|n[-_]cpu[-_]moe \d+|exps=CPU|last \d+ of \d+ layers|CPU only|whole",
        cell.options,
    )
    threads = re.search(r"threads (\d+)", cell.options)
    told = " ".join(what).replace("n-cpu-moe", "-ncmoe") + (f", {threads[0]}" if threads else "")
    pairs = [
        f"{_rate(told)} / {_rate(own)}" if told and own else ""
        for told, own in (
            (cell.decode, cell.decode_predicted),
            (cell.prompt, cell.prompt_predicted),
        )
    ]
    depth = f"{cell.depth:,}" if cell.depth else ""
    kind = cell.kind.split(":")[0].split(" (")[0]
    columns = [cell.model.split(" (")[0], kind, cell.card, where.strip(), told, depth, *pairs]
    return f"| {' | '.join(columns)} |"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--table", action="store_true", help="rows for docs/plan.md")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.file.read_text().splitlines() if line.strip()]
    cells, skipped = predicted(rows)
    for cell in cells:
        print(table_row(cell) if given.table else line_of(cell))
    report = {"cells": [asdict(cell) for cell in cells], "not_predicted": dict(skipped)}
    for name, found in (
        ("decode", errors((c.decode, c.decode_predicted) for c in cells)),
        ("prompt", errors((c.prompt, c.prompt_predicted) for c in cells)),
    ):
        median, tenth = np.median(np.abs(found)), np.quantile(np.abs(found), 0.9)
        report[name] = {"cells": len(found), "median": median, "nine_of_ten": tenth}
        report[name] |= {"measured_over_predicted": float(np.exp(np.median(found)))}
        print(f"{name}: {report[name]}")
    for why, count in skipped.most_common():
        print(f"not predicted: {count} {why}")
    if given.output:
        given.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

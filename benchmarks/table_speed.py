"""The tables of speeds: a chat model, several texts, the server, planted sparsity."""

import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

from table_contents import TYPES, ZEN_4, ZEN_5, markdown, path_of, percent, result, signed, times

RIVALS = ("llama.cpp", "llama.cpp, flash")
PROMPTS = (5, 64, 256)

# ---- prompts, generation, batches and speculation -----------------------------------------------

SMOLLM2 = "SmolLM2-135M-Instruct"


def chat(kind: str, name: str = f"chat-model-{ZEN_4}") -> Any:
    """A type's measurements with two threads."""
    return result(name)["types"][kind]["2"]


def chat_model_of(columns: list[tuple[str, Any]]) -> str:
    """SmolLM2's speeds against llama.cpp's. `columns`: (header, the measurements of a type)."""
    decode = [found["decode"] for _, found in columns]
    rows = [
        [
            "decode, tokens/s, ours and theirs",
            *(f"{d['tokens_per_s']:.0f}, {d['rival_tokens_per_s']:.0f}" for d in decode),
        ],
        [
            "share of the byte limit, ours and theirs",
            *(f"{d['share_of_limit']:.0%}, {d['rival_share_of_limit']:.0%}" for d in decode),
        ],
        ["decode, times llama.cpp", *(times(d["times_rival"]) for d in decode)],
    ]
    for count in PROMPTS:
        found = [each[f"prompt of {count}"] for _, each in columns]
        rows.append([f"prompt of {count}", *(times(p["times_rival"]) for p in found)])
    return markdown([f"{SMOLLM2}, dense", *(header for header, _ in columns)], rows)


EXPERTS = {
    ("qwen3-30b-a3b", "q4_k_m"): "12 of Qwen3-30B-A3B's layers, Q4_K_M",
    ("qwen3-30b-a3b", "q8_0"): "the same, q8_0",
    ("gpt-oss-20b", "mxfp4"): "8 of gpt-oss-20b's, MXFP4",
    ("qwen3.6-35b-a3b", "q4_k_m"): "8 of Qwen3.6-35B-A3B's, Q4_K_M",
}


def experts() -> str:
    """Speeds of mixtures against llama.cpp's, where they were measured."""
    rows = []
    for (model, kind), label in EXPERTS.items():
        if not path_of(f"experts-{model}-{kind}-{ZEN_4}").exists():
            continue
        found = result(f"experts-{model}-{kind}-{ZEN_4}")
        for threads, words in (("2", "2 threads"), ("1", "1 thread")):
            if threads not in found:
                continue
            of = found[threads]
            prompts = [of.get(f"prompt of {n}") for n in (16, 64, 512)]
            cells = [times(p["times_rival"]) if p else "-" for p in prompts]
            decode, share, eight = "-", "-", "-"
            if "decode" in of:
                decode = times(of["decode"]["times_rival"])
                share = f"{of['decode']['share_of_limit']:.0%}"
            if "batches" in of:
                rates = of["batches"]["tokens_per_s"]
                eight = times(rates["dense"]["8"] / max(rates[rival]["8"] for rival in RIVALS))
            rows.append([f"{label}, {words}", decode, share, *cells, eight])
    header = ["times llama.cpp", "decode", "share of the byte limit"]
    return markdown([*header, *(f"prompt of {n}" for n in (16, 64, 512)), "8 texts"], rows)


SHAPES = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B"}
OTHERS = ("hottest_first", "uniform", "cpu_moe", "layers", "cpu")


ROUTINGS = {
    "1": "Zipf 1",
    "0.7": "Zipf 0.7",
    "0.5": "Zipf 0.5",
    "1:8": "8 topics",
    "1@200": "Zipf 1, 200 GB/s",
    "1:8@200": "8 topics, 200 GB/s",
}


def expert_routings() -> str:
    """Over the budgets of each case: the largest gap, and the least and longest times of other
    placements relative to the plan's."""
    rows, found = [], result("expert-plans")["rows"]
    for name, (case, words) in product(SHAPES, ROUTINGS.items()):
        own = [row for row in found if (row["model"], row["case"]) == (name, case)]
        cells = [
            _range([row["ms"][way] / row["ms"]["plan"] for row in own if way in row["ms"]])
            for way in ("hottest_first", "uniform", "cpu_moe")
        ]
        gap = max(row["gap"] for row in own)
        rows.append([f"{SHAPES[name]}, {words}", f"{gap:.2%}", *cells])
    return markdown(["", "largest gap", "hottest first", "any experts", "`--n-cpu-moe`"], rows)


def _range(ratios: list[float]) -> str:
    least, most = (f"{each:.3f}" for each in (min(ratios), max(ratios)))
    return least if least == most else f"{least} to {most}"


def expert_plans() -> str:
    """Predicted times of plans of mixtures, beside other placements."""
    rows = []
    for row in result("expert-plans")["rows"]:
        if row["case"] != "1":
            continue
        plan = row["ms"]["plan"]
        others = [times(row["ms"][way] / plan) if way in row["ms"] else "-" for way in OTHERS]
        there = f"{row['hot']:,} of {row['experts']:,}"
        rows.append(
            [
                f"{SHAPES[row['model']]}, {row['gib']:g}",
                f"{row['processor_s']:.1f}",
                f"{row['gap']:.2%}",
                there,
                f"{plan:.1f}",
                *others,
            ]
        )
    header = [
        "GiB",
        "solver, s",
        "gap",
        "experts on the GPU",
        "ms a token",
        "hottest first",
        "any experts",
        "`--n-cpu-moe`",
        "whole layers",
        "the CPU alone",
    ]
    return markdown(header, rows)


def after_texts() -> str:
    """Times of a token after texts of several lengths, by kind of layer."""
    found = result(f"experts-qwen3.6-35b-a3b-q4_k_m-{ZEN_4}")["2"]["after_texts"]
    names = ("s", "attention_s", "delta_s")
    rows = [
        [f"{int(length):,} tokens", *(f"{1e3 * of[name]:.2f}" for name in names)]
        for length, of in found.items()
    ]
    return markdown(["after", "ms a token", "attention", "delta nets"], rows)


def silent_experts() -> str:
    """Modes of a mixture whose experts have silent neurons."""
    rows, found = [], result(f"experts-smallthinker-4b-q8_0-{ZEN_4}")
    for threads, words in (("2", "2 threads"), ("1", "1 thread")):
        ratios = found[threads]["dense_over_exact"]
        parts = ("s", "bytes", "experts_s", "experts_bytes")
        rows.append([words, *(times(ratios[part]) for part in parts)])
    header = ["dense over exact", "a token", "its bytes", "experts", "their bytes"]
    return markdown(header, rows)


def silent_neurons() -> str:
    """Modes of a model with silent neurons, and llama.cpp."""
    rows, found = [], result(f"experts-minitron-4b-q8_0-{ZEN_4}")
    for threads, words in (("2", "2 threads"), ("1", "1 thread")):
        modes, ratios = found[threads], found[threads]["dense_over_exact"]
        seconds = {name: modes[name]["a_token"]["s"] for name in ("dense", "exact", "llama.cpp")}
        rows.append(
            [
                words,
                *(f"{1e3 * of:.1f} ms" for of in seconds.values()),
                times(ratios["s"]),
                times(ratios["bytes"]),
                times(seconds["llama.cpp"] / seconds["exact"]),
            ]
        )
    header = [
        "a token",
        "dense",
        "exact",
        "llama.cpp",
        "dense over exact",
        "its bytes",
        "llama.cpp over exact",
    ]
    return markdown(header, rows)


def chat_model() -> str:
    processors = {"Zen 5": ZEN_5, "Zen 4": ZEN_4}
    return chat_model_of(
        [
            (f"{label}: {kind}", chat(kind, f"chat-model-{name}"))
            for label, name in processors.items()
            for kind in TYPES
        ]
    )


GEMMA = {level: f"bench-gemma3-270m-{level}-{ZEN_4}" for level in ("avx512bf16", "avx2")}


def downloaded() -> str:
    """A real file at two levels; llama.cpp is built for the machine in both."""
    rows = []
    for level, name in GEMMA.items():
        prompt, decode = result(name)["tests"]
        share = percent(decode["share_of_limit"])
        rows.append([level, times(decode["ratio"]), share, times(prompt["ratio"])])
    header = ["Gemma 3 270M, Q4_K_M", "decode, times llama.cpp", "share of the byte limit"]
    return markdown([*header, "prompt of 512"], rows)


def types() -> str:
    """Each type of downloaded files, with two threads."""
    rows = []
    for kind, found in result(f"k-quant-model-{ZEN_4}")["types"].items():
        decode, prompt = found["2"]["decode"], found["2"]["prompt of 512"]
        shares = (decode["share_of_limit"], decode["rival_share_of_limit"])
        ratios = [times(test["times_rival"]) for test in (decode, prompt)]
        rows.append([kind, ratios[0], *map(percent, shares), ratios[1]])
    header = [
        "times llama.cpp",
        "decode",
        "share of the byte limit",
        "llama.cpp's",
        "prompt of 512",
    ]
    return markdown(header, rows)


def chat_model_forced() -> str:
    parts = ("decode", *(f"prompt of {count}" for count in PROMPTS))
    rows = []
    for level in ("avxvnni", "avx2"):
        models = [(kind, chat(kind, f"chat-model-{level}-{ZEN_5}")) for kind in TYPES]
        k_quant = result(f"k-quant-model-{level}-{ZEN_5}")["types"]["q4_k_m"]["2"]
        for label, found in (*models, ("1.1 B, Q4_K_M", k_quant)):
            cells = (times(found[part]["times_rival"]) for part in parts)
            rows.append([f"{level}, {label}", *cells])
    return markdown(["level of both sides, times llama.cpp", *parts], rows)


def batch(model: str, label: str, mode: str, processors: dict[str, str]) -> str:
    """Tokens per second by number of texts in a batch. `processors` maps the table's name of a
    processor to the one in the results' file names."""
    rows = []
    for processor, name in processors.items():
        rates = result(f"batch-{model}-{name}")["tokens_per_s"]
        counts = list(rates[mode])
        best = {count: max(rates[rival][count] for rival in RIVALS) for count in counts}
        rows += [
            [f"{processor}, tokens/s", *(f"{rates[mode][c]:.0f}" for c in counts)],
            ["times llama.cpp's batches", *(times(rates[mode][c] / best[c]) for c in counts)],
        ]
    return markdown([f"{label}, texts at a time", *counts], rows)


def drafts() -> str:
    header = ["level, text", "from the text itself", "lowest of the texts", "`-md`", "lowest"]
    header += ["guesses accepted", "`llama-server -md`", "ours over llama-server, both `-md`"]
    rows = []
    for level in ("avx512bf16", "avx2"):
        texts = result(f"drafts-{level}-{ZEN_5}")["texts"]
        for about in ("code", "prose", "German", "rewritten"):
            of_kind = [text for name, text in texts.items() if name.startswith(about)]

            def gains(kind: str, base: str, of_kind: list = of_kind) -> list[float]:
                return [t[kind]["tokens_per_s"] / t[base]["tokens_per_s"] for t in of_kind]

            cells = []
            for kind in ("ngram", "draft"):
                found = gains(kind, "none")
                cells += [times(statistics.median(found)), times(min(found))]
            drafted, accepted = (
                sum(text["draft"][key] for text in of_kind) for key in ("drafted", "accepted")
            )
            cells.append(percent(accepted / drafted) if drafted else "")
            for kind, base in (("llama.cpp, draft", "llama.cpp"), ("draft", "llama.cpp, draft")):
                has_rival = base in of_kind[0]
                cells.append(times(statistics.median(gains(kind, base))) if has_rival else "")
            rows.append([f"{level}, {about}", *cells])
    return markdown(header, rows)


ROW_MODELS = {
    "qwen2.5-coder-1.5b-instruct-q4_k_m": "1.5B, Q4_K_M",
    "qwen2.5-coder-1.5b-instruct-q8_0": "1.5B, q8_0",
    "qwen3-30b-a3b-q4_k_m": "12 layers of Qwen3-30B-A3B, Q4_K_M",
}


FEW = ("2", "4", "6", "8")


def rows_over_one() -> str:
    """A check of a draft: the time of a few rows over that of one."""
    lines, models = [], result(f"rows-{ZEN_5}")["models"]
    for model, label in ROW_MODELS.items():
        for side, seconds in models.get(model, {}).items():
            one = seconds["1"]
            cells = [f"{seconds[count] / one:.2f}" for count in FEW]
            name = side if "llama" in side else f"hotsplit, {side}"
            lines.append([f"{label}, {name}", f"{1e3 * one:.1f} ms", *cells])
    return markdown(["", "one row", *(f"{count} rows" for count in FEW)], lines)


# ---- the server ---------------------------------------------------------------------------------


def serve_throughput() -> str:
    found = result(f"serve-throughput-smollm2-q8_0-{ZEN_4}")
    ours, ratios = found["medians"]["hotsplit"], found["ratios"]
    names = ("llama-server", "llama-server, flash")
    rows = []
    for clients in (1, 4, 16):
        rate, first = f"tokens/s, {clients} clients", f"first token ms, {clients} clients"
        theirs = max(found["medians"][name][rate] for name in names)
        rows.append(
            [
                str(clients),
                f"{ours[rate]:.0f}",
                f"{theirs:.0f}",
                times(ratios[rate]),
                times(ratios[first]),
            ]
        )
    header = [
        "clients",
        "tokens/s, ours",
        "llama-server",
        "times as many",
        "first token, times as fast",
    ]
    return markdown(header, rows)


def serve_first_token() -> str:
    found = result(f"serve-throughput-smollm2-q8_0-{ZEN_4}")
    rows = []
    for name in ("new", "kept"):
        key = f"{name} 1,000 tokens, first token ms"
        ours = found["medians"]["hotsplit"][key]
        rows.append([f"{name} 1,000 tokens", f"{ours:,.0f} ms", times(found["ratios"][key])])
    return markdown(["prompt", "first token", "times as fast as llama-server"], rows)


def serve_load() -> str:
    found = result(f"serve-load-{ZEN_4}")
    first, gap = found["first_token_ms"], found["token_gap_ms"]
    rows = [
        ["clients, minutes", f"{found['clients']}, {found['seconds'] / 60:.0f}"],
        ["answers, each byte-identical to the same request alone", f"{found['finished']:,}"],
        ["cancelled at random moments", f"{found['cancelled']:,}"],
        ["refused by the full queue", f"{found['refused']:,}"],
        ["lost, mixed up or stuck", str(found["num_failures"])],
        ["tokens/s, alongside other work", f"{found['tokens_per_s']:.0f}"],
        [
            "first token, queue included, p50 and p99",
            f"{first['p50'] / 1e3:.1f} s, {first['p99'] / 1e3:.1f} s",
        ],
        ["between tokens, p50 and p99", f"{gap['p50']:.0f} ms, {gap['p99']:.0f} ms"],
        ["growth of resident memory after the first minutes", signed(found["rss_growth"])],
    ]
    return markdown(["", ""], rows)


# ---- planted sparsity: the 1.1 B model, and the small bundled one -------------------------------


def decode_planted() -> str:
    rows = []
    for name, processor in (
        (f"decode-{ZEN_5}", "Zen 5"),
        (f"decode-avx2-{ZEN_5}", "Zen 5, AVX2 only"),
        (f"decode-{ZEN_4}", "Zen 4"),
        ("decode-intel-xeon-processor-2.50ghz", "Xeon"),
    ):
        for kind, found in result(name)["types"].items():
            modes = [found["2"][mode] for mode in ("dense", "exact", "predicted")]
            cells = [f"{times(m['times_rival'])} ({m['share_of_limit']:.0%})" for m in modes]
            rival = found["2"]["llama.cpp"]["share_of_limit"]
            rows.append([processor, kind, *cells, f"{rival:.0%}"])
    return markdown(["processor", "type", "dense", "exact", "predicted", "llama.cpp's share"], rows)


def prefill_planted() -> str:
    rows = []
    for name, processor in (
        (f"prefill-avx512bf16-{ZEN_5}", "Zen 5, AVX-512 VNNI and BF16"),
        (f"prefill-avx512vnni-{ZEN_4}", "Zen 4, AVX-512 VNNI"),
        (f"prefill-avx2-{ZEN_5}", "Zen 5, AVX2 only"),
        ("prefill-avx2-intel-xeon-processor-2.50ghz", "Xeon, AVX2 only"),
    ):
        for kind, found in result(name)["types"].items():
            modes = [found["2"].get(mode) for mode in ("dense", "exact", "predicted")]
            rows.append([processor, kind, *(times(m["times_rival"]) if m else "-" for m in modes)])
    return markdown(["processor", "type", "dense", "exact", "predicted"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "chat-model": chat_model,
    "downloaded": downloaded,
    "types": types,
    "chat-model-forced": chat_model_forced,
    "batch": lambda: batch(
        "smollm2-q8_0", "SmolLM2 q8_0, dense", "dense", {"Zen 5": ZEN_5, "Zen 4": ZEN_4}
    ),
    "batch-planted": lambda: batch(
        "planted-q8_0", "planted q8_0, predicted", "predicted", {"Zen 5": ZEN_5, "Zen 4": ZEN_4}
    ),
    "experts": experts,
    "after-texts": after_texts,
    "silent-experts": silent_experts,
    "silent-neurons": silent_neurons,
    "expert-plans": expert_plans,
    "expert-routings": expert_routings,
    "drafts": drafts,
    "rows": rows_over_one,
    "serve-throughput": serve_throughput,
    "serve-first-token": serve_first_token,
    "serve-load": serve_load,
    "decode-planted": decode_planted,
    "prefill-planted": prefill_planted,
}

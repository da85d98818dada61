"""The tables of `low_bits.py`'s result, files in types of one to four bits, and of
`by_processor.py`'s."""

from typing import Any

from table_contents import ZEN_4, ZEN_5, markdown, percent, result, times

LABELS = {
    "gemma3": "Gemma 3 270M",
    "qwen": "Qwen2.5-Coder 1.5B",
    "smollm2": "SmolLM2-135M",
    "1.1b": "1.1 B, random",
    "30b-a3b": "8 layers of Qwen3-30B-A3B, random",
}
PROMPTS = ("4", "64", "256")


def label(name: str) -> str:
    """What a file's name says: a model and a type."""
    model = next((each for each in LABELS if name.startswith(f"{each}-")), None)
    if model is None:
        return name
    return f"{LABELS[model]}, {name.removeprefix(f'{model}-').upper()}"


def values_of(found: Any) -> str:
    """How far the logits of two programs are from those of a file's values, and apart."""
    rows = []
    for name, file in found["files"].items():
        if "values" not in file:
            continue
        of = file["values"]
        cells = [f"{of[pair]['kl_mean']:.1e}" for pair in ("exact_ours", "exact_theirs")]
        tops = [percent(of[pair]["same_top"]) for pair in ("exact_ours", "exact_theirs")]
        greedy = f"{of['num_same']} of 64, {of['largest_gap']:.3f}"
        rows.append([label(name), *cells, f"{of['theirs_ours']['kl_mean']:.1e}", *tops, greedy])
    header = ["file", "KL of ours", "of llama.cpp", "between them"]
    header += ["same top token, ours", "llama.cpp's", "greedy tokens alike, largest gap"]
    return markdown(header, rows)


def speed_of(found: Any) -> str:
    """Speeds of each level beside those of each rival, of a token and of so many rows, with two
    threads."""
    rows, rivals = [], rivals_of(found)
    for name, file in found["files"].items():
        if "speed" not in file:
            continue
        memory = file["speed"]["memory_bytes"]
        sides = file["speed"]["2"]["sides"]
        for level in (side for side in sides if side in memory):
            own = sides[level]
            token, prompts_s = own["token_s"], own["prompts_s"]
            others = [sides.get(rival) for rival in rivals]
            cells = [_ratios(token, [each and each["token_s"] for each in others])]
            for count in PROMPTS:
                theirs = [each and each["prompts_s"][count] for each in others]
                cells.append(_ratios(prompts_s[count], theirs))
            share = percent(own["share_of_limit"])
            grown = times(memory[level] / file["file_bytes"])
            first = f"{label(name)}, {level}"
            rows.append([first, grown, f"{1 / token:.1f}", share, *cells])
    header = [f"times {', '.join(rivals)}", "memory over file", "tokens/s"]
    header += ["of the byte limit", "decode", *(f"prompt of {count}" for count in PROMPTS)]
    return markdown(header, rows)


def rivals_of(found: Any) -> list[str]:
    """The sides that are not levels of ours."""
    names: dict[str, None] = {}
    for file in found["files"].values():
        if speed := file.get("speed"):
            sides = (side for each in ("1", "2") for side in speed.get(each, {}).get("sides", {}))
            names |= dict.fromkeys(side for side in sides if side not in speed["memory_bytes"])
    return list(names)


def _ratios(own: float, theirs: list[float | None]) -> str:
    return ", ".join("-" if each is None else times(each / own) for each in theirs)


TABLES = {
    "low-bits-values": lambda: values_of(result(f"low-bits-{ZEN_5}")),
    "low-bits-speed": lambda: speed_of(result(f"low-bits-{ZEN_5}")),
    "by-processor": lambda: speed_of(result(f"by-processor-{ZEN_5}")),
    "by-processor-zen-4": lambda: speed_of(result(f"by-processor-{ZEN_4}")),
}

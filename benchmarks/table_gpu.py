"""The tables of what was measured on a GPU, from benchmarks/results/gpu-*.json."""

from typing import Any

from table_contents import markdown, percent, result, times

NAME, TRAINED = "gpu-nvidia-h100-80gb-hbm3", "gpu-trained-nvidia-h100-80gb-hbm3"
DIVIDED, WHOLE = "%", "resident"


def rows_of(name: str, what: str) -> list[Any]:
    """The measured rows whose names contain these two words."""
    found = result(NAME)["rows"]
    is_measured = {"decode_tokens_per_s", "times_rival"}.issubset
    return [
        row for row in found if is_measured(row) and name in row["name"] and what in row["name"]
    ]


def decode() -> str:
    """Decode and a prompt of 512 tokens, each against llama.cpp within the same budget."""
    header = (
        "model, memory on the card",
        "mode",
        "tokens/s",
        "llama.cpp's layers there",
        "times llama.cpp",
        "predicted over measured",
        "prompt, times llama.cpp",
    )
    rows = []
    for row in (*rows_of("", DIVIDED), *rows_of("", WHOLE)):
        predicted = row.get("predicted_over_measured")
        rows.append(
            [
                row["name"].replace("%", " %"),
                row["mode"],
                f"{row['decode_tokens_per_s']:.0f}",
                f"{row['rival_layers']}",
                times(row["times_rival"]),
                "-" if predicted is None else percent(predicted),
                times(row["times_rival_prefill"]),
            ]
        )
    return markdown(header, rows)


def trained() -> str:
    """A trained model by plans, beside each of the two processors alone."""
    header = (
        "SmolLM2-135M on an H100",
        "ms a token",
        "predicted",
        "a prompt of some 60 tokens, ms",
    )
    rows = []
    for row in result(TRAINED)["rows"]:
        predicted = row["predicted_s"]
        rows.append(
            [
                row["name"],
                f"{1e3 * row['seconds_per_token']:.1f}",
                "-" if predicted is None else f"{1e3 * predicted:.1f}",
                f"{1e3 * row['prompt_s']:.0f}",
            ]
        )
    return markdown(header, rows)


TABLES = {"gpu decode": decode, "gpu trained": trained}

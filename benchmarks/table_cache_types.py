"""The tables of the KV cache's types: what each loses, and how fast it is."""

from math import exp

from table_contents import ZEN_5, markdown, percent, result, signed, times

FILE = f"cache-types-{ZEN_5}"
DEPTHS = ("512", "4096", "8000")


def cache_types() -> str:
    rows = []
    for name, found in result(FILE)["loss"]["types"].items():
        rows.append([f"`{name}`", f"{found['bytes_of_f16']:.2f}",
                     f"{found['kl']:.2g} ± {found['kl_error']:.1g}",
                     signed(exp(found["loss_difference"]) - 1, 2),
                     percent(found["same_top_token"], 1)])  # fmt: skip
    return markdown(
        ["keys, values", "bytes relative to f16", "KL", "perplexity", "same top token"], rows
    )


def cache_speed() -> str:
    """A row for each type: decode speed at each depth over llama.cpp's in the same run."""
    rows = [
        [f"`{name}`", *(times(found[depth]["times_rival"]) for depth in DEPTHS)]
        for name, found in result(FILE)["speed"]["types"].items()
    ]
    return markdown(["keys, values", *(f"after {int(depth):,} tokens" for depth in DEPTHS)], rows)


TABLES = {"cache-types": cache_types, "cache-speed": cache_speed}

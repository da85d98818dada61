"""The options of the KV cache: storage types, -ctk and -ctv as in llama.cpp, and key selection."""

import click

from hotsplit.commands.options.shared import engine_option, joined
from hotsplit.options.cache_types import NAMES
from hotsplit.options.key_selection import DEFAULT

# Under the names of `Engine.load`.
cache_type_options = joined(
    engine_option(
        "cache_type_k", "-ctk", "--cache-type-k", type=click.Choice(NAMES), metavar="TYPE",
        help=f"Type of cached keys (on the CPU without a plan): {', '.join(NAMES)}.",
    ),
    engine_option(
        "cache_type_v", "-ctv", "--cache-type-v", type=click.Choice(NAMES), metavar="TYPE",
        help="Type of cached values. [default: that of the keys]",
    ),
    engine_option(
        "kv_offload", "--kv-offload", is_flag=False, flag_value=DEFAULT, metavar="[SIZES]",
        help="In long texts, read only the first keys, the last ones, and the best-scoring ones in"
        " between (on the CPU, or as the plan says); sizes such as window=2048,top=512.",
    ),
)  # fmt: skip

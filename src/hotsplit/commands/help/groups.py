"""The headings under which the help of a command with many options groups them, and the examples at
the end of the help of most commands, of which a test parses every line.

An option belongs to the first heading that names its parameter. If none does, or if it would be
alone under its heading, it is listed under "Other options"."""

from collections import Counter

import click

LEAST = 20  # a command with more options than this groups them
ALL, REST = "Options", "Other options"
GROUPS: tuple[tuple[str, str], ...] = (
    (
        "Input and output",
        "prompt prompt_file prompts_file profile machine output heat_map explained text_key"
        " is_merge num_logprobs is_shown json_lines as_json force prompt_cache",
    ),
    ("Memory", "host_budget_bytes"),
    ("Search", "sweep_range is_check"),
    ("Chat", "is_chat system system_file template variables"),
    (
        "Length",
        "max_tokens context_length rope_scaling rope_scale num_sequences shifts stops ignores_end",
    ),
    ("Preparing the model", "vram corpora tokens outtype tokenizer activation is_verified yes"),
    ("Measurements", "prompt_lengths gen_lengths depths repetitions text"),
    ("Comparison with llama.cpp", "compare compare_model compare_gpu_layers"),
    ("Predictors", "train_predictors predictor_rank"),
    ("Address and access", "host port api_key origins hosts alias"),
    ("Load", "parallel kept queue timeout_s drain_s"),
    ("Sampling", "temperature top_k top_p min_p repeat_penalty seed help_sampling"),
    ("Constrained output", "json_schema grammar regex"),
    ("Speculative decoding", "spec_type model_draft draft_max"),
    ("KV cache", "cache_type_k cache_type_v kv_offload"),
    ("Computation", "split cpu_ffn mode max_loss neuron_cache ram_bytes threads device"),
)
_TITLES = {name: title for title, names in reversed(GROUPS) for name in names.split()}


def write_options(
    command: click.Command, ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    """Writes a command's options, under headings if there are many."""
    shown = [
        (_TITLES.get(param.name or "", REST), record)
        for param in command.get_params(ctx)
        if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None
    ]
    if len(shown) <= LEAST:
        shown = [(ALL, record) for _, record in shown]
    else:
        counts = Counter(title for title, _ in shown)
        shown = [(title if counts[title] > 1 else REST, record) for title, record in shown]
    for title in (ALL, *dict(GROUPS), REST):
        if records := [record for of, record in shown if of == title]:
            with formatter.section(title):
                formatter.write_dl(records)


EXAMPLES = """
hotsplit convert CHECKPOINT -o model.gguf --outtype q8_0
hotsplit convert ORG/NAME -o model.gguf
hotsplit convert other.gguf -o model.gguf
hotsplit convert model.gguf -o sparse.gguf --predictors predictors
hotsplit calibrate -o machine.json
hotsplit calibrate -o machine.json --gpu-from rtx-4060-8gb
hotsplit profile model.gguf --corpus text.txt -o model.profile.safetensors
hotsplit profile model.gguf --corpus texts -o p.safetensors --train-predictors predictors
hotsplit profile --merge a.safetensors b.safetensors -o both.safetensors
hotsplit plan ORG/NAME --vram 8GiB --machine rtx-4060-8gb
hotsplit plan ORG/NAME-GGUF:Q4_K_M --machine rtx-3060-12gb+ddr5-5600
hotsplit plan model.gguf -c 32768
hotsplit solve model.gguf --profile p.safetensors --machine machine.json -vb 8GiB -o plan.gguf
hotsplit solve model.gguf --machine rtx-4060-8gb -vb 7GiB -o plan.gguf
hotsplit solve model.gguf --profile p.safetensors --machine machine.json --sweep 2GiB:24GiB -o\
 curve.json
hotsplit generate model.gguf -p "Once upon a time" -n 200
hotsplit generate model.gguf --split plan.gguf -f prompt.txt
hotsplit generate model.gguf --chat -p "What is a neuron?" --temp 0
hotsplit generate model.gguf --prompts prompts.txt --json
hotsplit chat model.gguf
hotsplit chat model.gguf -sys "Answer in one sentence." -c 4096
hotsplit serve model.gguf
hotsplit serve model.gguf --port 8000 --parallel 8 -c 4096
hotsplit eval model.gguf --corpus held-out.txt
hotsplit eval model.gguf --split plan.gguf --corpus held-out.txt --tokens 4096
hotsplit inspect model.gguf --tensors
hotsplit inspect CHECKPOINT --json
hotsplit inspect model.gguf --graph --split plan.gguf
hotsplit export plan.gguf --profile p.safetensors --format gpuidx -o out.gpuidx
hotsplit export p.safetensors --format powerinfer-activations -o activation
hotsplit export p.safetensors --format eplb -o counts.json
hotsplit export m.gguf --llama-cpp --split plan.gguf --profile p.safetensors --machine\
 machine.json
"""


def examples_of(command: str | None) -> str | None:
    """The examples of a command in a form that click does not wrap; None if it has none."""
    lines = [line for line in EXAMPLES.splitlines() if line.startswith(f"hotsplit {command} ")]
    return "\n  ".join(["\b\nExamples:", *lines]) if lines else None

"""`hotsplit serve`: an OpenAI-compatible server."""

import json
import os
import sys
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.options import command_options as common
from hotsplit.commands.options.engine_options import long_text_options
from hotsplit.commands.options.preparation import preparation, preparation_options
from hotsplit.commands.options.sampling_options import (
    model_sampling,
    sampling_options,
    take_sampling_options,
)
from hotsplit.commands.options.slow_plans import warn_of_slow_plan
from hotsplit.commands.options.speculation_options import (
    speculation_options,
    take_speculation_options,
)
from hotsplit.commands.terminal.prompt_sources import template_options, template_variables
from hotsplit.errors import HotsplitError
from hotsplit.options.engine_config import EngineConfig
from hotsplit.system.sizes import format_bytes

if TYPE_CHECKING:
    from hotsplit.runtime.engine import Engine
    from hotsplit.serve.serve_config import ServeConfig
    from hotsplit.serve.served_model import ServedModel

KEY_VARIABLE = "HOTSPLIT_API_KEY"
PACKAGES = ("starlette", "uvicorn", "prometheus_client")


@click.command(cls=common.FileCommand)
@click.argument("model", type=common.FILE)
@common.placement_options
@preparation_options
@common.option_table(
    f"""
--host | text = 127.0.0.1 | Address to listen on; 0.0.0.0 means all, best with --api-key.
--port | int = 8080 | Port to listen on; 0 picks a free one.
-np --parallel | int = 1 | Texts generated at a time, each with a whole --context. [with --split:
    half of those that the plan has room for]
--kept | int | Number of further texts whose KV cache is kept for requests with the same prefix.
    [default: as many as --parallel; with a plan, all that it has room for]
--queue | int = 64 | Waiting texts from which on further requests are refused with 429.
-n --max-tokens --n-predict | max_tokens: int = -1 | Maximum tokens per answer; -1: as many as the
    context has room for.
-to --timeout | timeout_s: float = 600 | Seconds that a request may take.
--drain | drain_s: float = 30 | Seconds that answers have to finish when the server is stopped.
--api-key | text KEY | Require this key in every request except /health; better set in the
    environment variable {KEY_VARIABLE}.
--cors | origins: text* ORIGIN | Allow web pages of this origin, e.g. http://localhost:3000, or *
    for all; may be repeated.
--allow-host | hosts: text* NAME | Without a key: also accept requests to this host name; may be
    repeated.
-a --alias | text NAME | The model's name in the API. [default: its file's]
"""
)
@common.context_option(
    "Context length of a request in tokens. [default: the plan's, or the model's up to 4,096]"
)
@template_options
@sampling_options
@speculation_options
@long_text_options
@common.ram_option
@common.running_options
@common.json_option
def serve(
    model: Path,
    split: Path | None,
    as_json: bool,
    api_key: str | None,
    threads: int | None,
    **options: Any,
) -> None:
    """Serve a model over OpenAI's API, with a chat page.

    Sampling options are the defaults for requests. With --json, one line on stdout gives the
    address as soon as the server is ready."""
    from hotsplit.serve.serve_config import ServeConfig

    options["api_key"] = api_key if api_key is not None else os.environ.get(KEY_VARIABLE)
    options["variables"] = template_variables(options["variables"])
    drafts = take_speculation_options(options)
    sampling, asked = take_sampling_options(options), common.take_engine_options(options)
    names = ("vram", "tokenizer", "yes", "model_draft")
    placing = {name: options.pop(name) for name in names} | {
        "model": model,
        "split": split,
        "threads": threads,
        **{field.name: getattr(asked, field.name) for field in fields(EngineConfig)},
    }
    config = ServeConfig(model=model, sampling=sampling, drafts=drafts, **options)
    for name in PACKAGES:
        try:
            import_module(name)
        except ImportError as error:
            raise HotsplitError(
                f"a server needs the package {name}: pip install {' '.join(PACKAGES)}"
            ) from error
    from hotsplit.serve.server import listener_of

    listener_of(config).close()  # an address that cannot be had is refused before long work
    with preparation(placing, config.parallel + config.num_kept) as prepared:
        if prepared is not None and config.alias is None:
            config = replace(config, alias=model.name.removesuffix(".gguf"))
        _serve(config, placing, as_json=as_json)


def _serve(config: "ServeConfig", placing: dict[str, Any], *, as_json: bool) -> None:
    """Serves the model of `placing` (options of an engine, and "model", "split" and "threads")."""
    from hotsplit.artifacts.split_file import Split
    from hotsplit.runtime.engine import load_engine
    from hotsplit.runtime.kernels.threads import use_threads
    from hotsplit.runtime.resolved_options import device_of
    from hotsplit.serve.request_log import start_log
    from hotsplit.serve.server import Server

    names = ("model", "split", "threads", "model_draft")
    model, split, threads, model_draft = (placing.pop(name) for name in names)
    asked, plan_places = EngineConfig(**placing), None
    config = replace(config, model=model, model_draft=model_draft)
    if split is not None:
        plan_places = Split.load(split).num_sequences
        parallel, kept = _places_of(split, plan_places, config.parallel, config.kept)
        config = replace(config, parallel=parallel, kept=kept)
    num_places = config.parallel + config.num_kept
    start_log()

    def open_engine() -> "Engine":
        use_threads(threads)
        common.say(f"{model}: loading")
        if split is None and device_of(asked.device).type == "cpu" and not asked.cpu_ffn:
            _check_memory(model, asked, num_places)
        engine = load_engine(model, split, replace(asked, num_sequences=num_places))
        warn_of_slow_plan(engine, split)
        model_sampling(engine, config.sampling)  # says what comes from the file
        _say_loaded(engine, config, plan_places)
        return engine

    def on_ready(url: str, served: "ServedModel") -> None:
        common.say(f"serving {served.name} at {url}/v1; Ctrl-C stops")
        if as_json and sys.stdout is not None:
            line = {
                "url": url,
                "model": served.name,
                "context": served.context_length,
                "parallel": config.parallel,
                "kept": config.num_kept,
                "pid": os.getpid(),
            }
            click.echo(json.dumps(line))
            sys.stdout.flush()

    Server(config, num_places, open_engine, on_ready).run()
    common.say(f"{model}: stopped")


def _places_of(split: Path, places: int, parallel: int, kept: int | None) -> tuple[int, int]:
    """--parallel and --kept within a plan's `places`: by default half of them, or what --kept
    leaves, and the rest. Raises HotsplitError if more are given."""
    source = click.get_current_context().get_parameter_source("parallel")
    if source == click.core.ParameterSource.DEFAULT:
        parallel = max(1, places // 2 if kept is None else places - kept)
    kept = max(0, places - parallel) if kept is None else kept
    if parallel + kept > places:
        raise HotsplitError(
            f"{split}: budgets KV cache for {places} texts, but --parallel {parallel} with --kept"
            f" {kept} needs {parallel + kept}; run hotsplit solve with --sequences"
            f" {parallel + kept}"
        )
    return parallel, kept


def _check_memory(model: Path, asked: EngineConfig, num_places: int) -> None:
    """Checks that the KV cache fits into free memory: torch fills it with zeros at once."""
    import torch

    from hotsplit.artifacts.model_file import ModelFile, with_rope_scaling
    from hotsplit.runtime.resolved_options import bytes_by_role_of, cache_types_of, context_of
    from hotsplit.system.system_memory import free_memory_bytes

    file, device = ModelFile.load(model), torch.device("cpu")
    file = with_rope_scaling(file, *asked.rope, asked.context_length)
    types = cache_types_of(file, asked, has_plan=False, device=device)
    context_length = context_of(file, None, asked.context_length)
    items = bytes_by_role_of(
        file,
        None,
        context_length,
        device,
        num_sequences=num_places,
        cache_types=types,
        has_draft=asked.draft_block,
    )
    wanted, free = items["cpu"]["kv_cache"], free_memory_bytes()
    if wanted > free:
        states = " with recurrent states" if file.spec.has_states else ""
        raise HotsplitError(
            f"the KV cache{states} takes {format_bytes(wanted)}, but only {format_bytes(free)} are"
            " free; give a smaller --context, --parallel or --kept"
        )


def _say_loaded(engine: "Engine", config: "ServeConfig", plan_places: int | None) -> None:
    """Says what memory the server holds, and why requests may be slow or differ in last bits."""
    total = sum(sum(items.values()) for items in engine.bytes_by_role.values())
    cache = sum(items.get("kv_cache", 0) for items in engine.bytes_by_role.values())
    places = config.parallel + config.num_kept
    common.say(
        f"{config.model}: loaded in {engine.load_s:.1f} s, mode {engine.mode};"
        f" {format_bytes(total)} in all, of which {format_bytes(cache)} are KV cache for"
        f" {places} texts of {engine.context_length:,} tokens ({config.parallel} at a time,"
        f" {config.num_kept} kept)"
    )
    if plan_places == 1:
        common.say(
            "note: the plan is for one text, so requests are answered one at a time; hotsplit"
            " solve with --sequences budgets KV cache for more"
        )
    elif config.parallel > 1 and not engine.has_row_steps:
        common.say(
            "note: a step computes one token here, because of a neuron cache, of keys in main"
            " memory or of a small workspace; requests take turns, and together are no faster than"
            " in succession"
        )
    if not engine.has_equal_rows:
        common.say(
            "note: on this device, reusing the KV cache of earlier requests and reading several"
            ' prompts together may change the last bits of results; "cache_prompt": false turns'
            " reuse off"
        )

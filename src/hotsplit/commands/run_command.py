"""`hotsplit run`, `generate` and `chat`: from a checkpoint, a name on the hub or a GGUF to tokens.

They differ in what they do by default: `run` prepares every model and `generate` and `chat` only
what cannot be run as it is; `generate` needs a prompt, and `chat` takes it as a message."""

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from hotsplit.commands.conversation import converse
from hotsplit.commands.options.command_options import FILE, FileCommand, say
from hotsplit.commands.options.constraint_options import constraint_of
from hotsplit.commands.options.preparation import preparation
from hotsplit.commands.options.sampling_options import model_sampling
from hotsplit.commands.options.slow_plans import warn_of_slow_plan
from hotsplit.commands.request import CommandRequest, request_options, take_request
from hotsplit.commands.text_writing import write
from hotsplit.errors import HotsplitError
from hotsplit.options.engine_config import EngineConfig

if TYPE_CHECKING:
    from hotsplit.run.stages import RunJob


@click.command(cls=FileCommand, short_help="Prepare a model, then continue a text or chat.")
@click.argument("model", type=FILE, metavar="SOURCE")
@request_options
def run(**options: Any) -> None:
    """Prepare a model with all that it needs, then continue a text or chat.

    SOURCE is a checkpoint folder, the name of a checkpoint on the hub (org/name) or any GGUF.
    Everything made on the way is cached for the next run: hotsplit cache list."""
    _serve_request(take_request(options), options, is_prepared=True)


@click.command(cls=FileCommand)
@click.argument("model", type=FILE)
@request_options
def generate(**options: Any) -> None:
    """Continue a text, or several together.

    The text, or the JSON asked for instead, goes to stdout; everything else goes to stderr."""
    _serve_request(take_request(options, is_text=True), options)


@click.command(cls=FileCommand)
@click.argument("model", type=FILE)
@request_options
def chat(**options: Any) -> None:
    """Talk with a model.

    If stdin is not a terminal, each of its lines is a message. /help lists the commands."""
    _serve_request(take_request(options, is_chat=True), options)


def _serve_request(
    request: CommandRequest, options: dict[str, Any], *, is_prepared: bool = False
) -> None:
    """Prepares and loads the model, and writes the texts or holds the conversation."""
    name, num_texts = str(options["model"]), max(1, len(request.prompts))
    check = partial(_check_model, request)
    with preparation(options, num_texts, is_always=is_prepared, check=check) as preparing:
        model, split, threads, draft_model = (
            options.pop(name) for name in ("model", "split", "threads", "model_draft")
        )
        config = EngineConfig(num_sequences=num_texts, **options)
        from hotsplit.runtime.engine import load_engine
        from hotsplit.runtime.kernels.threads import use_threads

        use_threads(threads)
        with load_engine(model, split, config) as engine:
            warn_of_slow_plan(engine, split)
            sampling = model_sampling(engine, request.sampling)
            if request.prompts:
                write(engine, request, sampling, draft_model, preparing)
            else:
                converse(engine, request, sampling, draft_model, name if preparing else model.name)


def _check_model(request: CommandRequest, job: "RunJob") -> None:
    from hotsplit.runtime.text.chat_template import chat_template_of, has_template
    from hotsplit.runtime.text.codec import TextCodec

    model, template = job.choice.model, request.template
    if not request.prompts and template is None and not has_template(model):
        raise HotsplitError(
            f"{job.source.name}: has no chat template, so give it a text to continue (-p TEXT),"
            " or a template (--chat-template NAME)"
        )
    if request.prompts and not (request.is_many or request.is_answer) and has_template(model):
        say("note: the text is continued; --chat has this chat model answer it as a message")
    if template is None and request.constraint is None:
        return
    codec = TextCodec.of(model)
    if request.constraint is not None:
        constraint_of(request.constraint, codec)
    if template is not None and (request.is_answer or not request.prompts):
        chat_template_of(model, codec, template)

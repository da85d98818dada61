"""llama-server's /infill, which editors ask for code between two texts."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, FailFast, Field

from hotsplit.options.generation_options import ENDLESS
from hotsplit.serve.answers import AnswerBody, Body, timings_of
from hotsplit.serve.exchange import Exchange, dumps, sse
from hotsplit.serve.request_body import RequestBody, checked, only
from hotsplit.serve.sampling_fields import Samplers
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.text_requests import NumTokens, TextBody, TextRequest, text_request
from hotsplit.serve.texts import Arrival, Report

MAX_FILES = 256
# The names that llama-server writes, and what it writes between texts for models without a token
# before a file (server-common.cpp, format_prompt_infill).
_REPOSITORY, _FILE, _SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"
_STOP_TYPES = {"end of text": "eos", "stop string": "word"}
_ONE = only(1, why="an answer of /infill has one text")


def _without_infill(samplers: object) -> object:
    """llama.cpp's sampler of this name merges what begins alike; here the others draw alone."""
    if not isinstance(samplers, list) or "infill" not in samplers:
        return samplers
    return [name for name in samplers if name != "infill"]


def _at_least_one(count: object) -> object:
    """Editors ask for no tokens to have a prompt computed; here that is an answer of one."""
    return 1 if count == 0 else count


class OtherFile(RequestBody):
    text: str
    filename: str = "tmp"


class InfillBody(TextBody):
    """Editors send limits of time and indentation, too, which end nothing here."""

    ignored: ClassVar = TextBody.ignored | {"t_max_prompt_ms"}
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[OtherFile], Field(max_length=MAX_FILES), FailFast()] = []
    prompt: str = ""
    n: Annotated[int, _ONE] | None = None
    n_cmpl: Annotated[int, _ONE] | None = None
    n_predict: Annotated[NumTokens, BeforeValidator(_at_least_one)] | None = None
    samplers: Annotated[Samplers, BeforeValidator(_without_infill)] | None = None
    n_indent: object = None
    t_max_predict_ms: object = None
    n_probs: Annotated[object, only(0, why="/v1/completions has logprobs")] = None
    response_fields: Annotated[list[str], Field(max_length=64)] = []


def infill_request(
    values: Mapping[str, object], served: ServedModel, arrival: Arrival
) -> TextRequest:
    """The request of /infill. Raises ApiError."""
    body = checked(InfillBody, values)
    before = served.encode_literal(body.input_prefix, "input_prefix")
    before += served.encode_plain(body.prompt, "prompt")  # special tokens in it are tokens
    after = served.encode_literal(body.input_suffix, "input_suffix")
    alone = served.infill_prompt(before, after, "input_prefix")
    num_tokens = 1 if body.n_predict in (None, ENDLESS) else body.n_predict
    files = _files(body.input_extra, served, served.context_length - len(alone) - num_tokens)
    request = text_request(
        body,
        served,
        arrival,
        [served.infill_prompt(before, after, "input_prefix", files)],
        "input_prefix",
        codec=served.codec,
        num_logprobs=None,
    )
    return replace(request, settings={"response_fields": body.response_fields})


def _files(files: Sequence[OtherFile], served: ServedModel, room: int) -> list[int]:
    """The tokens of the last files that have room, under their names, if the model has a token for
    that."""
    tokens = served.infill_tokens("input_extra")

    def named(name: str) -> list[int]:
        if tokens.file is None:
            return served.encode_literal(_SNIPPET, "input_extra")
        return [tokens.file, *served.encode_literal(name, "input_extra")]

    if not files:
        return []
    head, own = list[int](), list[int]()  # the latter of what is filled in
    if tokens.repository is not None:
        head = [tokens.repository, *served.encode_literal(_REPOSITORY, "input_extra")]
    if tokens.file is not None:
        own = named(_FILE)
    found = own
    for file in reversed(files):
        more = named(f"{file.filename}\n") + served.encode_literal(file.text, "input_extra")
        if len(head) + len(more) + len(found) > room:
            break
        found = more + found
    return head + found if found is not own else []


class InfillAnswer(AnswerBody):
    """llama-server's own form: no choices, and no [DONE] at a stream's end."""

    end = b""

    async def whole(self, exchange: Exchange) -> bytes:
        (output,) = await self._outputs(exchange)
        return dumps(self._last(output.content))

    async def pieces(self, exchange: Exchange) -> AsyncIterator[bytes]:
        async for batch in self._batches(exchange):
            content = "".join(piece.content for _, piece in batch)
            yield sse({"content": content, "stop": False}) if content else b""
        yield sse(self._last(""))

    def _last(self, content: str) -> Body:
        (report,) = self._report()
        body = _body(self._service.served.name, content, report)
        fields = self._asked.settings["response_fields"]
        assert isinstance(fields, list)
        return {path: _at(body, path) for path in fields} if fields else body


def _body(name: str, content: str, report: Report) -> Body:
    return {
        "content": content,
        "stop": True,
        "model": name,
        "stop_type": _STOP_TYPES.get(report.stopped_by, "limit"),
        "stopping_word": report.stop,
        "tokens_predicted": report.generated_tokens,
        "tokens_evaluated": report.prompt_tokens,
        "tokens_cached": report.prompt_tokens + report.generated_tokens,
        "truncated": False,
        "timings": timings_of([report]),
    }


def _at(body: Body, path: str) -> object:
    """The value at a path such as timings/prompt_n; None if there is none."""
    value: object = body
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value

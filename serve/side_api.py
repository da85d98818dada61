"""Endpoints that generate nothing: models, tokens, templates, properties, health, metrics, page."""

import base64
import hashlib
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import FailFast, Field
from starlette.requests import Request
from starlette.responses import Response

from hotsplit.runtime.text.chat_template import ChatTemplate
from hotsplit.serve.api_error import ApiError, wrong
from hotsplit.serve.chat_requests import RenderingBody, rendering_of
from hotsplit.serve.exchange import JsonResponse, dumps, dumps_with
from hotsplit.serve.request_body import RequestBody, checked
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.service import Service

PAGE = Path(__file__).with_name("page.html")
MAX_TEXT = 1 << 20  # characters in a /tokenize request; a second of one core
NUM_AT_ONCE = 1 << 12  # tokens that are written as JSON in one call


class TokenizeBody(RequestBody):
    content: Annotated[str, Field(max_length=MAX_TEXT)]
    add_special: bool = False
    with_pieces: bool = False
    parse_special: bool = True


class DetokenizeBody(RequestBody):
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 17), FailFast()] = []


async def health(service: Service, request: Request) -> Response:
    """200 if the server accepts requests, 503 while it loads the model or stops."""
    if service.state == "ready":
        return JsonResponse({"status": "ok"})
    word = "loading model" if service.state == "loading" else "stopping"
    return JsonResponse({"status": word}, status_code=503)


async def metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)


async def page(service: Service, request: Request) -> Response:
    """The one static file; its path is fixed."""
    if not PAGE.is_file():
        raise ApiError(404, "this server has no page; its API is under /v1", "not_found")
    content, policy = _page()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
    }
    return Response(content, media_type="text/html; charset=utf-8", headers=headers)


@cache
def _page() -> tuple[bytes, str]:
    """(the page, a Content-Security-Policy that allows only its own style and script)."""
    text = PAGE.read_text(encoding="utf-8")

    def hashes(name: str) -> str:
        parts = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()) for part in parts]
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

    return text.encode(), (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


async def models(service: Service, request: Request) -> Response:
    return JsonResponse({"object": "list", "data": [_model(service)]})


async def model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    if name != service.served.name:
        raise ApiError(404, f"The model {name[:80]!r} does not exist.", "model_not_found")
    return JsonResponse(_model(service))


def _model(service: Service) -> dict[str, object]:
    served = service.served
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "hotsplit",
        "meta": {
            "n_vocab": served.vocab_size,
            "n_ctx": served.context_length,
            "n_ctx_train": served.trained_context_length,
            "n_params": served.num_parameters,
            "size": served.num_bytes,
        },
    }


async def props(service: Service, request: Request) -> Response:
    served, config = service.served, service.config
    template = served.template
    defaults = {
        name: value for name, value in vars(served.defaults).items() if name != "logit_bias"
    }
    return JsonResponse(
        {
            "default_generation_settings": {
                "n_ctx": served.context_length,
                "params": {**defaults, "n_predict": served.max_tokens},
            },
            "total_slots": config.parallel,
            "model_alias": served.name,
            "model_path": config.model.name,
            "chat_template": template.text if isinstance(template, ChatTemplate) else "",
            "modalities": {"vision": False, "audio": False},
            "build_info": service.fingerprint,
            "is_sleeping": False,
        }
    )


async def tokenize(service: Service, request: Request) -> Response:
    """llama-server's /tokenize: adds special tokens only if asked, and reads those in the text as
    text if parse_special is false; with_pieces also returns texts."""
    values = await service.fields(request)
    served = service.served
    body = checked(TokenizeBody, values)

    def answer() -> Response:
        reader = served
        if not body.parse_special:
            reader = replace(served, codec=served.codec.literal)
        encode = reader.encode if body.add_special else reader.encode_plain
        ids = encode(body.content, "content")
        content = token_list(served, ids, has_pieces=body.with_pieces)
        return Response(content, media_type="application/json")

    return await service.prepared(answer)


async def detokenize(service: Service, request: Request) -> Response:
    values = await service.fields(request)
    served = service.served
    ids = checked(DetokenizeBody, values).tokens
    if max(ids, default=0) >= served.vocab_size:
        last = served.vocab_size - 1
        raise wrong("tokens", f"tokens has {max(ids)}, wanted token ids, 0 to {last}")
    tokenizer = served.codec.tokenizer  # its `decode` holds the GIL
    (text,) = await service.prepared(
        lambda: tokenizer.decode_batch([ids], skip_special_tokens=False)
    )
    return JsonResponse({"content": text})


async def apply_template(service: Service, request: Request) -> Response:
    values = await service.fields(request)
    served = service.served
    body = checked(RenderingBody, values)
    rendering = await service.prepared(lambda: rendering_of(body, served))
    return JsonResponse({"prompt": rendering.text})


def token_list(served: ServedModel, ids: list[int], *, has_pieces: bool) -> bytes:
    """The body of an answer of /tokenize."""
    parts = (ids[at : at + NUM_AT_ONCE] for at in range(0, len(ids), NUM_AT_ONCE))

    def written(part: list[int]) -> bytes:
        pieces = [{"id": i, "piece": _piece(served.token_bytes(i))} for i in part]
        return dumps(pieces if has_pieces else part)[1:-1]

    return dumps_with({}, "tokens", map(written, parts))


def _piece(found: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are not valid UTF-8."""
    try:
        return found.decode("utf-8")
    except UnicodeDecodeError:
        return list(found)

"""The ASGI application: routes, and errors of them."""

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from hotsplit.serve import ollama_api, side_api
from hotsplit.serve.answers import answered
from hotsplit.serve.api_error import ApiError
from hotsplit.serve.chat_requests import chat_request
from hotsplit.serve.completions_api import ChatAnswer, CompletionAnswer
from hotsplit.serve.embeddings import embeddings
from hotsplit.serve.exchange import error_response
from hotsplit.serve.guard import Guard
from hotsplit.serve.infill_api import InfillAnswer, infill_request
from hotsplit.serve.messages_api import MessagesAnswer
from hotsplit.serve.messages_requests import count_tokens, messages_request
from hotsplit.serve.responses_api import ResponsesAnswer
from hotsplit.serve.responses_requests import responses_request
from hotsplit.serve.service import Service
from hotsplit.serve.text_requests import completion_request

Handler = Callable[[Service, Request], Awaitable[Response]]
CHAT = partial(answered, parse=chat_request, answer_of=ChatAnswer)
COMPLETIONS = partial(answered, parse=completion_request, answer_of=CompletionAnswer)
INFILL = partial(answered, parse=infill_request, answer_of=InfillAnswer)
MESSAGES = partial(answered, parse=messages_request, answer_of=MessagesAnswer)
RESPONSES = partial(answered, parse=responses_request, answer_of=ResponsesAnswer)
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/completions", COMPLETIONS),
    ("POST", "/v1/responses", RESPONSES),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/messages", MESSAGES),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/api/chat", ollama_api.ollama_chat),
    ("POST", "/api/generate", ollama_api.ollama_generate),
    ("GET", "/api/tags", ollama_api.tags),
    ("POST", "/api/show", ollama_api.show),
    ("GET", "/api/version", ollama_api.ollama_version),
    ("POST", "/infill", INFILL),  # as in llama-server
    ("GET", "/v1/models", side_api.models),
    ("GET", "/v1/models/{name:path}", side_api.model),
    ("POST", "/chat/completions", CHAT),
    ("GET", "/models", side_api.models),
    ("POST", "/tokenize", side_api.tokenize),
    ("POST", "/detokenize", side_api.detokenize),
    ("POST", "/apply-template", side_api.apply_template),
    ("GET", "/health", side_api.health),
    ("GET", "/metrics", side_api.metrics),
    ("GET", "/props", side_api.props),
    ("GET", "/", side_api.page),
)
# Paths of llama-server, and those that come closest here.
OF_LLAMACPP = {
    "/completion": "/v1/completions",
    "/completions": "/v1/completions",
    "/slots": "/metrics",
}


def app_of(service: Service) -> ASGIApp:
    routes = [
        Route(path, _endpoint(service, handler), methods=[method])
        for method, path, handler in ROUTES
    ]
    router = Router(routes, redirect_slashes=False)
    service.metrics.paths = frozenset(path for _, path, _ in ROUTES)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = service  # if unset, the router answers unknown paths itself
        try:
            await router(scope, receive, send)
        except HTTPException as error:
            response = error_response(_error_of(error, scope), scope["path"])
            await response(scope, receive, send)

    return Guard(app, service)


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(service, request)
        except ApiError as error:
            request.scope["state"]["line"].error = error.message
            return error_response(error, request.url.path)

    return endpoint


def _error_of(error: HTTPException, scope: Scope) -> ApiError:
    shown = scope["path"][:80]
    if error.status_code == 405:
        found = ApiError(
            405,
            f"{shown!r} does not support {scope['method']}",
            "method_not_allowed",
            headers=error.headers,
        )
    else:
        assert error.status_code == 404, error
        ours = OF_LLAMACPP.get(scope["path"])
        hint = f"; closest to llama-server's is {ours}" if ours else ""
        found = ApiError(404, f"Unknown path: {scope['method']} {shown!r}{hint}", "not_found")
    scope["state"]["line"].error = found.message
    return found

"""Errors sent to clients, in the form of the API that they use: OpenAI's, Anthropic's, Ollama's."""

from collections.abc import Mapping

ANTHROPIC, OLLAMA = "/v1/messages", "/api/"  # what their paths begin with
_ANTHROPICS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param, self.headers = param, dict(headers or {})

    def body(self, path: str) -> dict[str, object]:
        """The answer to a request of this path."""
        if path.startswith(OLLAMA):
            return {"error": self.message}
        if path.startswith(ANTHROPIC):
            kind = _ANTHROPICS.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def wrong(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """The error for an invalid request."""
    return ApiError(400, message, code, param=param)


def busy(message: str, retry_s: int) -> ApiError:
    """The error for a request that a full queue has no room for."""
    message, headers = f"{message}; try again later", {"Retry-After": str(retry_s)}
    return ApiError(429, message, "rate_limit_exceeded", headers=headers)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, "service_unavailable", headers={"Retry-After": "5"})


def too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is longer than {most} bytes", "request_too_large")

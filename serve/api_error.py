"""Errors sent to clients, in OpenAI's format: status, message, type, parameter and code."""

from collections.abc import Mapping

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

    def body(self) -> dict[str, object]:
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

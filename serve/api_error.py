"""Errors sent to clients, in OpenAI's format: status, message, type, parameter and code."""

from collections.abc import Mapping
from typing import Literal

Kind = Literal["invalid_request_error", "rate_limit_error", "server_error"]


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: Kind = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, object]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def wrong(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """The error for an invalid request."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, retry_s: int) -> ApiError:
    """The error for a request that a full queue has no room for."""
    return ApiError(
        429,
        f"{message}; try again later",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(retry_s)},
    )


def unavailable(message: str) -> ApiError:
    return ApiError(
        503, message, kind="server_error", code="service_unavailable", headers={"Retry-After": "5"}
    )


def too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is longer than {most} bytes", code="request_too_large")

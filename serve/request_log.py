"""Logs a line for each request."""

import json
import logging
import sys
import time
from dataclasses import dataclass

_LOGGERS = ("hotsplit.serve", "uvicorn.error")


@dataclass(kw_only=True)
class RequestLine:
    """Filled in while a request is answered. `status` is 0 until the answer begins."""

    id: str
    method: str
    path: str
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0
    queued_s: float = 0.0
    error: str = ""

    def text(self) -> str:
        parts = [self.id, self.method, json.dumps(self.path)[1:-1][:80], str(self.status)]
        if self.prompt_tokens:
            parts.append(
                f"{self.prompt_tokens} tokens ({self.cached_tokens} cached),"
                f" {self.generated_tokens} generated"
            )
            if self.drafted_tokens:
                parts[-1] += f", {self.accepted_tokens} of {self.drafted_tokens} drafted right"
        parts.append(f"{self.seconds:.3f} s")
        if self.error:
            parts.append(json.dumps(self.error, ensure_ascii=False)[:300])
        return " ".join(parts)


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = getattr(record, "line", None)
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = record.getMessage() if line is None else line.text()
        if line is None and record.exc_info and record.exc_info[1]:
            text += "\n" + self.formatException(record.exc_info)
        is_warning = record.levelno >= logging.WARNING
        return f"{at} {record.levelname.lower()}: {text}" if is_warning else f"{at} {text}"


def start_log() -> None:
    """Sends our lines and uvicorn's warnings to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == _LOGGERS[0] else logging.WARNING)

"""Renders chat templates in a worker process. template_worker runs Jinja."""

import json
import weakref
from collections.abc import Mapping
from signal import SIGALRM, SIGKILL, SIGPROF
from threading import Lock

from hotsplit.errors import HotsplitError
from hotsplit.runtime.text.worker import Worker
from hotsplit.runtime.text.worker_inside import WALL_S

# CPU time of a rendering, and more for each message: 30 times what Gemma 4's template takes.
CPU_S, MESSAGE_CPU_S = 0.5, 0.002
_REASONS = {
    "syntax": "is not a valid Jinja template",
    "template": "rejects these messages",
    "other": "fails with these messages",
    "size": "writes too long a text",
}


class TemplateProcess:
    """A worker process, started at the first rendering (0.1 s; later renderings take 1 ms).
    Thread-safe."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._lock = Lock()

    def render(self, name: str, template: str, variables: Mapping[str, object]) -> str:
        """The rendered text. Raises HotsplitError, naming `name`, for a template that does not
        parse, raises, writes too much, or exceeds the worker's CPU time or memory, and for
        variables that are not JSON."""
        messages = variables.get("messages")
        cpu_s = CPU_S + MESSAGE_CPU_S * (len(messages) if isinstance(messages, list) else 0)
        asked = {"template": template, "variables": variables, "cpu_s": cpu_s}
        try:
            request = json.dumps(asked).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise HotsplitError(
                f"a message is not JSON ({str(error)[:200]}); wanted texts, numbers, lists, objects"
            ) from error
        with self._lock:
            answer = self._exchange(name, request, cpu_s)
        if "text" in answer:
            return answer["text"]
        raise HotsplitError(
            f"{name} {_REASONS[answer['kind']]}: {answer['error']}; see --chat-template for another"
        )

    def close(self) -> None:
        """Ends the process, once a rendering in another thread is done; the next rendering starts
        a new one."""
        with self._lock:
            self._stop()

    def _stop(self) -> int:
        worker, self._worker = self._worker, None
        return 0 if worker is None else worker.end()

    def _exchange(self, name: str, request: bytes, cpu_s: float) -> dict[str, str]:
        if self._worker is None:
            self._worker = Worker("hotsplit.runtime.text.template_worker", ("jinja2", "markupsafe"))
            weakref.finalize(self, self._worker.end)
        try:
            answer = self._worker.ask(request)
        except BaseException:  # an unread answer must not be taken for the next one
            self._stop()
            raise
        if answer is not None:
            return json.loads(answer)
        reason = _reason(self._stop(), cpu_s)
        raise HotsplitError(f"{name} {reason}; see --chat-template for another")


def _reason(code: int, cpu_s: float) -> str:
    if code in (-SIGPROF, -SIGALRM, -SIGKILL):
        return f"takes too long: it was stopped after {cpu_s:.2g} s of CPU time or {WALL_S:g} s"
    return f"ended the process that renders it (exit code {code})"

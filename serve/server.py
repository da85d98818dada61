"""The lifecycle of a server: its socket, the engine's thread, signals, shutdown.

The port is bound before the model is loaded, so a port in use is reported immediately; until the
model is loaded, /health says "loading model". After SIGTERM or SIGINT, new requests are refused,
running answers may take `drain_s` to finish, and `run` returns; a second signal ends the process at
once, with status 130."""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.metadata import version
from math import prod

import uvicorn

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_parts import num_bytes_of
from hotsplit.files.typed import shown
from hotsplit.runtime.answers.call_style import CallStyle, call_style
from hotsplit.runtime.drafting import drafting
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.generate.constraints import json_schema_constraint
from hotsplit.runtime.text.chat_template import ChatTemplate, chat_template_of, has_template
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.serve.app import app_of
from hotsplit.serve.connections import connection_class
from hotsplit.serve.guard import MAX_HEAD_BYTES
from hotsplit.serve.infill_tokens import infill_tokens
from hotsplit.serve.prefix_cache import PrefixCache
from hotsplit.serve.scheduler import Batch, Scheduler
from hotsplit.serve.serve_config import ServeConfig
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.service import Service
from hotsplit.system.system_memory import check_address_space

log = logging.getLogger("hotsplit.serve")
LAST_S = 2.0  # time to send the last answers
_REQUESTS_BYTES = 128 << 20  # of address space: stacks of threads, bodies, answers
M_ARENA_MAX = -8  # mallopt(3)
FALLBACK = "chatml"  # the template of files without one

OpenEngine = Callable[[], AbstractContextManager[Engine]]


class Server:
    """A server. `open_engine` is called in the engine's thread and opens an engine for `num_places`
    sequences; `on_ready` gets the server's address and model once requests are accepted."""

    def __init__(
        self,
        config: ServeConfig,
        num_places: int,
        open_engine: OpenEngine,
        on_ready: Callable[[str, ServedModel], None],
    ) -> None:
        self.config, self._num_places = config, num_places
        self._open_engine, self._on_ready = open_engine, on_ready
        self.service = Service(config, f"hotsplit-{version('hotsplit')}")
        self._scheduler: Scheduler | None = None
        self._error: BaseException | None = None
        self._num_signals = 0

    def run(self) -> None:
        """Runs until a signal. Raises HotsplitError if the port or the model is unavailable."""
        # Keeps glibc from giving each thread that prepares requests an arena of its own, which it
        # would keep after a large request.
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
        listener = listener_of(self.config)
        try:
            asyncio.run(self._serve(listener))
        finally:
            listener.close()
            self.service.close()
        if self._error is not None:
            raise self._error

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._uvicorn = _Uvicorn(_uvicorn_config(self.config, self.service))
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        url = _url(self.config, listener)  # now, since uvicorn closes the socket when it stops
        thread = threading.Thread(target=self._run_engine, args=(url,), name="engine")
        thread.start()
        try:
            await self._uvicorn.serve(sockets=[listener])
        finally:
            self.service.state = "stopping"
            self._stop_scheduler()
            await asyncio.to_thread(thread.join)

    def _run_engine(self, url: str) -> None:
        """The body of the engine's thread: loads the model and runs the scheduler."""
        try:
            config = self.config
            with (
                self._open_engine() as engine,
                drafting(engine, config.drafts, config.model_draft, config.parallel) as drafts,
            ):
                served = served_of(self.config, engine)
                check_address_space(_REQUESTS_BYTES, "of requests")
                prefix_cache = PrefixCache(engine, self._num_places)
                scheduler = Scheduler(
                    engine,
                    prefix_cache,
                    self._post,
                    parallel=self.config.parallel,
                    queue=self.config.queue,
                    drafting=drafts,
                )
                self._scheduler = scheduler
                if self.service.is_stopping:  # signalled while the model was loading
                    scheduler.stop()
                self._tell(lambda: self._begin(served, scheduler, url))
                # Full collections, which hold the GIL, need not visit what lives until the end.
                gc.collect()
                gc.freeze()
                scheduler.run()
        except BaseException as error:  # noqa: BLE001  # raised by the main thread
            self._error = error
            self._tell(self._leave)

    def _begin(self, served: ServedModel, scheduler: Scheduler, url: str) -> None:
        self.service.begin(served, scheduler)
        if self.service.state != "ready":
            return
        try:
            self._on_ready(url, served)
        except OSError as error:  # stdout is full or closed
            self._error = error
            scheduler.stop()
            self._leave()

    def _post(self, batch: Batch) -> None:
        self._tell(lambda: [text.listen(text.number, event) for text, event in batch])

    def _tell(self, what: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed, so there is no listener
            assert self._loop.is_closed()

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            os._exit(130)
        was_loading = self.service.state == "loading"
        self.service.state = "stopping"
        if was_loading:
            self._leave()
        else:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Lets running answers finish for up to `drain_s`, then fails the rest."""
        await self._wait_for_answers(self.config.drain_s)
        self._stop_scheduler()
        await self._wait_for_answers(LAST_S)
        self._leave()

    async def _wait_for_answers(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.service.num_active and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def _stop_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.stop()

    def _leave(self) -> None:
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without its signal handling, which closes the port before answers finish."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(config: ServeConfig, service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        app_of(service),
        http=connection_class(config.read_s, config.max_connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=round(LAST_S),
    )


def served_of(config: ServeConfig, engine: Engine) -> ServedModel:
    model, codec = engine.model, engine.codec
    template = _template_of(config, model, codec)
    style = CallStyle() if isinstance(template, str) else call_style(template)
    if style.describes_tools:
        log.info(
            "the chat template has no tools, or writes calls in a form that is unknown here: the"
            " tools of a request are described in its first message"
        )
    served = ServedModel(
        name=config.alias or config.model.stem,
        created=int(config.model.stat().st_mtime),
        codec=codec,
        template=template,
        vocab_size=model.spec.vocab_size,
        context_length=engine.context_length,
        trained_context_length=model.spec.context_length,
        num_parameters=sum(prod(entry.shape) for entry in model.tensors.values()),
        num_bytes=num_bytes_of(config.model),
        hidden_size=model.spec.hidden_size,
        pooling=model.spec.pooling,
        longest_token=max(map(len, codec.tokenizer.get_vocab(with_added_tokens=True))),
        defaults=engine.sampling_with(config.sampling),
        max_tokens=config.max_tokens,
        variables=config.variables,
        call_style=style,
        infill=infill_tokens(model, codec.tokenizer),
    )
    served.chain(served.defaults)  # refuses impossible options
    _ = codec.literal  # read now, with the GIL held for a second if the vocabulary is large
    with suppress(HotsplitError):  # requests with constraints are answered with the reason
        json_schema_constraint({"type": "object"}, codec)  # fills the cache of the vocabulary
    return served


def _template_of(config: ServeConfig, model: ModelFile, codec: TextCodec) -> ChatTemplate | str:
    """The chat template: as in llama.cpp ChatML for a file without one. If the file's own cannot be
    used, the reason. Raises HotsplitError for one that was asked for and cannot be used."""
    wanted = config.template
    if wanted is None and not has_template(model):
        wanted = FALLBACK
        log.warning(
            "the file has no chat template: chats are written in %s, which its model may not know;"
            " --chat-template NAME|FILE gives another",
            FALLBACK,
        )
    try:
        template = chat_template_of(model, codec, wanted)
        template.render([{"role": "user", "content": "Hello"}])  # starts the worker process
    except HotsplitError as error:
        if config.template is not None:
            raise
        log.warning("chats are refused: %s", error)
        return str(error)
    return template


def listener_of(config: ServeConfig) -> socket.socket:
    """Listens at the address. Raises HotsplitError if it is no address, or taken."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise HotsplitError(f"--host {shown(config.host)}: {error.strerror or error}") from error
    except UnicodeError as error:  # from the idna codec: a label is empty or over 63 characters
        raise HotsplitError(
            f"--host {shown(config.host)} is not a host name; give one, or an address such as"
            " 127.0.0.1"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise HotsplitError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; give another"
            " --port, or 0 for any"
        ) from error
    return listener


def _url(config: ServeConfig, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"

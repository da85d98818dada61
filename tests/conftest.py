"""Fixtures that more than one test file uses, and checks of every test: no command that it runs
ends with the exit code of an unexpected error, the message of every HotsplitError is one line, and
pytest's process connects, and sends datagrams, to this machine only."""

import dataclasses
import functools
import gc
import os
import signal
import socket
import subprocess
import tempfile
from importlib.util import find_spec

# torch's threads otherwise spin on cores that other tests want: tests of the bundled model take
# five times as much processor time. torch reads this when it is imported, here and in the processes
# that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import forked
import pytest
import torch
from models import byte_level_keys, make_model, make_sizes

import hotsplit.cli
from hotsplit.commands.exit_codes import UNEXPECTED
from hotsplit.errors import HotsplitError
from hotsplit.runtime.kernels import threads
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.weights import resident

# Without a GPU, Triton kernels run in Triton's own interpreter, which must be selected before
# Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        import interpreter_loops  # noqa: F401

# What commands keep for later is, in tests, in a folder that is deleted after them.
_cache = tempfile.TemporaryDirectory(prefix="hotsplit-tests-")
os.environ.setdefault("HOTSPLIT_CACHE", _cache.name)

os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that tests start, too

forked.sync_nothing()

# Shells start background jobs with SIGINT ignored, and what they start inherits that: tests that
# interrupt a command would wait for ever. A handler of Python's is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)


def here_only(method, position=-1):
    """Wraps a socket's method whose argument at `position` is an address, which must be this
    machine's; it may be missing if the position is not the last."""

    @functools.wraps(method)
    def use(self, *arguments):
        address = arguments[position] if position < len(arguments) else None
        if self.family in (socket.AF_INET, socket.AF_INET6) and address is not None:
            host = address[0]
            assert host in ("localhost", "::1") or host.startswith("127."), (
                f"a test uses the network: {address}"
            )
        return method(self, *arguments)

    return use


for _name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, _name, here_only(getattr(socket.socket, _name)))
socket.socket.sendmsg = here_only(socket.socket.sendmsg, 3)

unexpected: list[str] = []  # commands of the running test
started: list[subprocess.Popen] = []
several_lines: list[str] = []  # messages of errors of the running test


def noted(main):
    """Wraps `main` and records unexpected ends; a test's `from hotsplit.cli import main` gets
    this one."""

    @functools.wraps(main)
    def run(argv=None):
        code = main(argv)
        if code == UNEXPECTED:
            unexpected.append(f"main({argv})")
        return code

    return run


class NotedProcess(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        started.append(self)
        super().__init__(*args, **kwargs)


def in_one_line(self, *arguments):
    Exception.__init__(self, *arguments)
    if "\n" in str(self):
        several_lines.append(str(self))


HotsplitError.__init__ = in_one_line  # type: ignore[method-assign]
hotsplit.cli.main = noted(hotsplit.cli.main)
subprocess.Popen = NotedProcess  # type: ignore[misc]  # subprocess.run's too


def unexpected_ends():
    """The commands that ended unexpectedly since the last call."""
    processes = [*started, *forked.finished]
    codes = [str(p.args) for p in processes if p.returncode == UNEXPECTED]
    found = [*unexpected, *codes]
    started.clear()
    forked.finished.clear()
    unexpected.clear()
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keeps Python's collector of garbage from a million objects that live to the end: what the
    test files import and the list of tests. It goes through them in half a second, which it did 32
    times before the first test, and again whenever an engine of a device was closed."""
    gc.disable()
    items = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return items


def pytest_collection_modifyitems(items):
    """What takes longest begins first, so that no processor waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_sanitizers.py")


@pytest.fixture
def may_end_unexpectedly():
    """Allows a test's commands to end with the exit code of an unexpected error."""
    yield
    unexpected_ends()


@pytest.fixture
def has_names_of_several_lines():
    """Allows messages that name a file with newlines in its name, which commands escape."""
    yield
    several_lines.clear()


@pytest.fixture(autouse=True)
def no_unexpected_end(request):
    several_lines.clear()
    yield
    assert not several_lines, f"an error of several lines: {several_lines}"
    if "may_end_unexpectedly" not in request.fixturenames:
        assert not (found := unexpected_ends()), f"exit code {UNEXPECTED}: {found}"


@pytest.fixture
def codec_model(tmp_path):
    """A random model with a tokenizer of single bytes; no token ends a text."""
    keys, vocab_size = byte_level_keys()
    model = make_model(sizes=make_sizes(vocab_size=vocab_size, context_length=64), extra_keys=keys)
    path = tmp_path / "codec.gguf"
    dataclasses.replace(model, path=path).save(path)
    return path


@pytest.fixture(autouse=True)
def level_and_threads_as_before():
    """What a test or a command in it leaves is no other test's: more threads than processors take
    ten times as much time."""
    before = library.num_threads(), torch.get_num_threads(), library.level()
    named = threads._named
    yield
    if before != (library.num_threads(), torch.get_num_threads(), library.level()):
        library.set_threads(before[0])
        torch.set_num_threads(before[1])
        library.set_level(before[2])
    threads._named = named


@pytest.fixture
def devices_types(monkeypatch):
    """Weights have the types that a device reads, where the CPU stands for one; otherwise it may
    read types with grids as files have them, if it measures that as faster."""
    monkeypatch.setattr(resident, "is_read_in_file", lambda *_: False)


@pytest.fixture(params=library.usable_levels())
def level(request):
    """Runs the test at each level that this machine can run."""
    library.set_level(request.param)
    return request.param


@pytest.fixture(scope="session")
def kernels():
    """Triton's kernels, on a CUDA device or in its interpreter."""
    from hotsplit.runtime.kernels.gpu.kernels import triton_kernels

    return triton_kernels()


@pytest.fixture
def several_rows(monkeypatch):
    """A program of a GPU kernel takes several rows of small matrices, as it does of large ones.
    This also saves time: the interpreter takes about 10 ms per program."""
    monkeypatch.setattr("hotsplit.runtime.kernels.gpu.launch.LEAST_PROGRAMS", 1)


@pytest.fixture
def preferred(monkeypatch):
    """Has models store tiles and groups of rows, whatever the level prefers."""
    monkeypatch.setattr(library, "prefers_tiles", lambda: True)

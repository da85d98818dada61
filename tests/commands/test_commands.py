"""A failing command prints one line, a traceback only if asked, and exits with the right code."""

import os
import signal
import subprocess
import sys
import time
from io import BytesIO, TextIOWrapper
from pathlib import Path
from shutil import which
from typing import Any

import click
import pytest
import torch
from models import make_model, make_profile
from paths import SEARCH_PATH, TESTS

from hotsplit.cli import main
from hotsplit.commands.all_commands import cli
from hotsplit.commands.exit_codes import UNEXPECTED, line_of
from hotsplit.commands.options.command_options import SIZE, FileCommand, FolderPath, OutputPath
from hotsplit.files.mapped_files import EXIT_CODE as CUT
from hotsplit.files.typed import printed_line
from hotsplit.system.sizes import format_bytes

PROGRAM = "import sys; from hotsplit.cli import main; sys.exit(main())"


def run(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess:
    """Runs code in a separate Python process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False, timeout=600, **options)


def lines_of(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.strip()]


# ---- errors -------------------------------------------------------------------------------------


def raising(monkeypatch, error: BaseException) -> None:
    def inspect_file(file):
        raise error

    monkeypatch.setattr("hotsplit.inspection.inspect_file.inspect_file", inspect_file)


def test_an_unexpected_error_prints_one_line(monkeypatch, capsys, may_end_unexpectedly):
    raising(monkeypatch, ValueError("two\nlines " + "x" * 1000))
    assert main(["inspect", "x"]) == UNEXPECTED == 70
    (line,) = lines_of(capsys)
    assert line.startswith("hotsplit inspect: unexpected ValueError: two lines xxx")
    assert "HOTSPLIT_DEBUG=1" in line and len(line) < 500


def test_hotsplit_debug_prints_the_traceback(monkeypatch, capsys, may_end_unexpectedly):
    monkeypatch.setenv("HOTSPLIT_DEBUG", "1")
    raising(monkeypatch, ValueError("odd"))
    assert main(["inspect", "x"]) == UNEXPECTED
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "in inspect_file" in shown
    assert shown.splitlines()[-1].startswith("hotsplit inspect: unexpected ValueError: odd")


def test_a_test_fails_if_its_command_ends_unexpectedly_or_an_error_has_two_lines(pytester_like):
    result = pytester_like(
        "from hotsplit.errors import HotsplitError\n"
        "def test_it(monkeypatch):\n"
        "    from hotsplit.cli import main\n"
        "    monkeypatch.setattr('hotsplit.commands.exit_codes._run', lambda *a, **k: 1 / 0)\n"
        "    main(['inspect', 'x'])\n"
        "def test_lines():\n"
        "    HotsplitError('two\\nlines')\n"
    )
    assert result.returncode != 0 and b"exit code 70: [\"main(['inspect', 'x'])\"]" in result.stdout
    assert rb"an error of several lines: ['two\nlines']" in result.stdout


@pytest.fixture
def pytester_like(tmp_path):
    """Runs a test file with this suite's conftest.py."""

    def run_tests(text: str) -> subprocess.CompletedProcess:
        (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
        (tmp_path / "test_x.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
        env = os.environ | {"PYTHONPATH": SEARCH_PATH}
        return subprocess.run(command, capture_output=True, check=False, cwd=tmp_path, env=env)

    return run_tests


def no_memory_of_torch() -> BaseException:
    try:
        torch.empty(1 << 60)
    except RuntimeError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "make", [MemoryError, lambda: torch.OutOfMemoryError("CUDA out of memory"), no_memory_of_torch]
)
def test_out_of_memory_prints_one_line(monkeypatch, capsys, make):
    raising(monkeypatch, make())
    assert main(["inspect", "x"]) == 1
    (line,) = lines_of(capsys)
    assert "out of memory" in line


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]) << 20,) * 2)
from hotsplit.cli import main
sys.argv[1:] = ["generate", sys.argv[2], "-p", "hi", "-n", "1", "--device", "cpu"]
sys.exit(main())
"""


@pytest.mark.parametrize("megabytes", [100, 400, 1000, 6000])
def test_a_limit_on_address_space_is_named(tmp_path, megabytes):
    """Libraries that cannot be mapped, and a model of 1 GiB (of holes) that cannot be."""
    path = tmp_path / "m.gguf"
    make_model().save(path)
    os.truncate(path, 1 << 30)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run(LIMITED, megabytes, path, env=env, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "bug" not in line
    what = f"raise the limit on address space (ulimit -v), now {format_bytes(megabytes << 20)}"
    assert line.endswith(what) == (megabytes < 6000), line


# A user that is not root, for whom the limit on processes holds, but who may read everything.
CAPABILITIES = "-all,+dac_override,+dac_read_search"
OTHER_USER = ["setpriv", "--reuid=65533", "--clear-groups", "--inh-caps", CAPABILITIES]
OTHER_USER += ["--ambient-caps", CAPABILITIES]


@pytest.mark.skipif(os.geteuid() != 0 or which("setpriv") is None, reason="needs another user")
@pytest.mark.parametrize("processes", [1, 5])
def test_a_limit_on_processes_is_named(tmp_path, processes):
    path = tmp_path / "m.gguf"
    make_model().save(path)
    code = LIMITED.replace("RLIMIT_AS", "RLIMIT_NPROC").replace(" << 20", "")
    command = [*OTHER_USER, sys.executable, "-c", code, str(processes), path]
    done = subprocess.run(command, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "raise the limit on processes (ulimit -u)" in line


def test_free_memory_is_within_the_limit_on_address_space():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30));"
        "from hotsplit.system import system_memory as m;"
        "m.memory_bytes = lambda: (64 << 30, 64 << 30);"
        "free, most = m.free_memory_bytes(), m.memory_limit_bytes();"
        "assert most <= 8 << 30 and 0 < free < most, (free, most)"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_a_file_that_fails_is_named(monkeypatch, capsys):
    raising(monkeypatch, PermissionError(13, "Permission denied", "/some/file"))
    assert main(["inspect", "x"]) == 1
    (line,) = lines_of(capsys)
    assert line == ("hotsplit inspect: /some/file: cannot be read or written: Permission denied")
    assert "b.bin" in line_of(FileNotFoundError(2, "gone", b"b.bin"))[0]


LONG = "a" * 100_000
LONG_ARGUMENTS = """
LONG
solve --LONG
solve -vb LONG
generate x --mode LONG
convert x -o y --tensor-type LONG
convert x -o y --activation LONG
convert x -o y --tensor-type LONG=q9
generate x -p a --device LONG
generate x -p a --samplers LONG
generate x -p a --kv-offload=LONG
inspect LONG
inspect FOLDERS
generate x -p a -t NINES
"""


def test_no_line_is_longer_than_a_screen(capsys):
    for line in LONG_ARGUMENTS.strip().splitlines():
        for name, text in (("LONG", LONG), ("FOLDERS", "b/" * 2000), ("NINES", "9" * 4000)):
            line = line.replace(name, text)
        assert main(line.split()) in (1, 2)
        (shown,) = lines_of(capsys)
        assert shown.startswith("hotsplit") and len(shown) < 1600, len(shown)


def test_the_middle_of_a_long_line_is_left_out():
    assert printed_line("x" * 1500) == "x" * 1500
    line = printed_line("hotsplit: " + LONG + "; do this")
    assert line.startswith("hotsplit: aaa") and line.endswith("aaa; do this")
    assert "[... 98,619 characters ...]" in line


ODD_NAMES = {"a\n\r\x1b[31mb": r"a\n\r\x1b[31mb", "a\u202eb\u2028": r"a\u202eb\u2028"}
ODD_NAMES["ü 模型\u3000"] = "ü 模型\u3000"


def two_profiles(folder: Path) -> list[str]:
    """Paths of two profiles of one model."""
    for number, name in enumerate("ab"):
        make_profile(make_model(), num_tokens=1000 + number).save(folder / name)
    return [str(folder / name) for name in "ab"]


@pytest.mark.parametrize("name, shown", ODD_NAMES.items())
def test_control_characters_of_a_name_are_escaped(
    tmp_path, capsys, name, shown, has_names_of_several_lines
):
    assert main(["inspect", name]) == 1
    assert capsys.readouterr().err.startswith(f"hotsplit: {shown}: no such file")
    words = ["profile", "--force", "--merge", *two_profiles(tmp_path), "-o", str(tmp_path / name)]
    assert main(words) == 0
    notes = capsys.readouterr().err  # newlines stay, as a note may be a table of several lines
    assert shown.replace(r"\n", "\n") in notes and "\x1b" not in notes


def test_an_error_in_a_thread_prints_one_line():
    code = (
        "import threading, hotsplit.commands.exit_codes as t\n"
        "def run(arguments, *, is_program):\n"
        "    thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()\n"
        "    return 0\n"
        "t._run = run\n"
    )
    result = run(code + PROGRAM, "inspect", "x")
    assert result.returncode == 0
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith("hotsplit inspect: unexpected ZeroDivisionError")


NO_SPACE = (">/dev/full", "No space left on device")
CLOSED = (">&-", "Bad file descriptor")


@pytest.mark.parametrize(
    "arguments, stdout, reason",
    [("inspect {} --json", *NO_SPACE), ("inspect {}", *CLOSED), ("--help", *NO_SPACE)],
)
def test_a_full_or_closed_stdout_gives_one_line(tmp_path, arguments, stdout, reason):
    make_profile(make_model()).save(tmp_path / "p")
    command = [sys.executable, "-c", PROGRAM, *arguments.format(tmp_path / "p").split()]
    result = subprocess.run(
        ["sh", "-c", f'exec "$@" {stdout}', "sh", *command], stderr=subprocess.PIPE, check=False
    )
    assert result.returncode == 1
    line = f"hotsplit: the output cannot be written: {reason}"
    assert result.stderr.decode().splitlines() == [line]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_stop_a_command_that_writes_files(tmp_path, closed):
    two_profiles(tmp_path)
    merge = ["profile", "--merge", "a", "b", "--force", "-o"]
    for output, how in (("c", closed), ("d", "")):
        command = [sys.executable, "-c", PROGRAM, *merge, output]
        code = f'exec "$@" {how}'
        assert subprocess.run(["sh", "-c", code, "sh", *command], cwd=tmp_path).returncode == 0
    assert (tmp_path / "c").read_bytes() == (tmp_path / "d").read_bytes()


def test_a_full_stderr_causes_no_further_error(tmp_path):
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", PROGRAM, "inspect", "none"]
        assert subprocess.run(command, stderr=full, check=False).returncode == 1


# ---- signals ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def heard():
    """Restores default handlers: a suite started by nohup or by a script's `&` ignores signals, and
    the processes of the tests would inherit that."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, found in before.items():
        if found == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, found in before.items():
        signal.signal(number, found)


# The signal arrives at an import: of the program's first module, of click, or of a command's code.
AT_IMPORT = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == NAME:
            os.kill(os.getpid(), NUMBER)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "name, number",
    [
        ("hotsplit.commands.exit_codes", signal.SIGINT),  # there are no other handlers yet
        ("click", signal.SIGINT),
        ("click", signal.SIGTERM),
        ("hotsplit.inspection.inspect_file", signal.SIGHUP),
    ],
)
def test_a_signal_during_start_up_prints_one_line(name, number):
    code = AT_IMPORT.replace("NAME", repr(name)).replace("NUMBER", str(int(number)))
    result = run(code + PROGRAM, "inspect", "x")
    assert result.returncode == 128 + number, result.stderr
    assert result.stderr == b"hotsplit: interrupted\n"  # it writes nothing


WRITES = """
import sys, hotsplit.commands.exit_codes as t
from pathlib import Path
from hotsplit.files.atomic import partial_file, partial_folder
def run(arguments, *, is_program):
    with partial_folder(Path(sys.argv[1])) as folder, partial_file(Path(sys.argv[2])) as file:
        print("ready", flush=True)
        WORK
t._run = run
"""
NATIVE = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'x', b'y', 1 << 40 >> 10)"


def stopped(folder: Path, work: str, *numbers: int) -> tuple[int, str, float]:
    """(exit code, stderr, seconds) of a program that is writing when signals come."""
    code = WRITES.replace("WORK", work) + PROGRAM
    command = [sys.executable, "-c", code, str(folder / "folder"), str(folder / "file")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    began = time.monotonic()
    for number in numbers:
        process.send_signal(number)
    _, error = process.communicate(timeout=30)
    return process.returncode, error, time.monotonic() - began


def test_a_signal_counts_even_if_a_library_replaces_its_exception(monkeypatch, capsys):
    def inspect_file(file):
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of object type 'X'") from None

    monkeypatch.setattr("hotsplit.inspection.inspect_file.inspect_file", inspect_file)
    assert main(["inspect", "x"]) == 128 + signal.SIGTERM
    assert lines_of(capsys) == ["hotsplit: interrupted"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_and_removes_what_it_wrote(tmp_path, number):
    code, error, _ = stopped(tmp_path, "import time; time.sleep(60)", number, signal.SIGTERM)
    # On a busy machine the second signal may come when the default handlers are back.
    assert code in (128 + number, 128 + signal.SIGTERM, -signal.SIGTERM)
    assert error == "hotsplit: interrupted; nothing half-written was left\n"
    assert not list(tmp_path.iterdir())


def test_a_signal_ends_native_code_that_runs_for_long(tmp_path):
    code, error, seconds = stopped(tmp_path, NATIVE, signal.SIGTERM)
    assert (code, error) == (143, "hotsplit: interrupted; nothing half-written was left\n")
    assert 2 < seconds < 15 and not list(tmp_path.iterdir())


def test_signals_that_were_ignored_before_the_start_stay_ignored(tmp_path):
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    at = AT_IMPORT.replace("NAME", "'click'").replace("NUMBER", str(int(signal.SIGHUP)))
    result = run(code + at + PROGRAM, "inspect", "none")
    assert result.returncode == 1 and b"no such file" in result.stderr


def test_a_command_restores_the_signal_handlers():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert main(["inspect", "none"]) == 1
    assert [signal.getsignal(number) for number in numbers] == before


# ---- inputs that are truncated while they are read ----------------------------------------------

CUT_INPUT = """
import os, sys, numpy as np, hotsplit.files.mapped_files as mapped
from pathlib import Path
from hotsplit.files.atomic import partial_file
assert mapped.guard()
data = np.memmap(sys.argv[1], np.uint8, "r")
with partial_file(Path(sys.argv[2])) as partial:
    partial.write_bytes(b"half")
    os.truncate(sys.argv[1], 4096)
    print(int(data[-1]))
"""


def test_a_mapped_input_that_is_truncated_is_named(tmp_path):
    (tmp_path / "in put").write_bytes(b"x" * (1 << 16))
    result = run(CUT_INPUT, tmp_path / "in put", tmp_path / "out")
    assert result.returncode == CUT == 74 and result.stdout == b""
    line = f"hotsplit: {tmp_path}/in put: was changed while it was read; run the command again\n"
    assert result.stderr.decode() == line
    assert [path.name for path in tmp_path.iterdir()] == ["in put"]


ABORTED = """
import ctypes, sys, hotsplit.files.mapped_files as mapped
from pathlib import Path
from hotsplit.files.atomic import partial_file
assert mapped.guard()
with partial_file(Path(sys.argv[1])) as partial:
    partial.write_bytes(b"half")
    ctypes.CDLL(None).abort()
"""


def test_a_library_that_aborts_ends_the_command_in_one_line(tmp_path):
    result = run(ABORTED, tmp_path / "out")
    assert (result.returncode, result.stdout) == (1, b"")
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith("hotsplit: a library has given up, most likely for want of memory")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGBUS])
def test_signals_that_no_mapped_file_causes_still_kill_the_process(number):
    code = (
        "import os, subprocess, time, hotsplit.files.mapped_files as m; assert m.guard()\n"
        f"subprocess.run(['kill', '-{int(number)}', str(os.getpid())]); time.sleep(9)"
    )
    assert run(code).returncode == -number


# ---- outputs that are inputs --------------------------------------------------------------------


def paths(kind: type | None) -> set[tuple[str, str]]:
    """The (command, option) pairs of one kind of path; None for the inputs."""
    return {
        (name, str(param.name))
        for name, command in cli.commands.items()
        for param in command.params
        if isinstance(param.type, click.Path)
        and (type(param.type) is kind if kind else type(param.type) is click.Path)
    }


OUTPUTS = {(name, "output") for name in ("convert", "calibrate", "profile", "solve", "export")}
OUTPUTS |= {(name, "prompt_cache") for name in ("run", "generate", "chat")}
OUTPUTS |= {("report", "output"), ("solve", "heat_map"), ("profile", "importances")}
FOLDERS = {("profile", "train_predictors")}
MANY = ("corpora", "files", "sources")


def test_every_option_that_names_a_file_is_an_input_or_an_output():
    assert all(isinstance(command, FileCommand) for command in cli.commands.values())
    assert paths(OutputPath) == OUTPUTS and paths(FolderPath) == FOLDERS
    output_words = {"output", "save", "write", "plot", "map", "cache"}
    for name, option in paths(None):
        assert not output_words & set(option.split("_")), (name, option, "reads like an output")


PAIRS = sorted(
    (name, output, other)
    for name, output in OUTPUTS - {("run", "prompt_cache"), ("chat", "prompt_cache")}
    for other in sorted(
        option for command, option in paths(None) | OUTPUTS if command == name and option != output
    )
)


def arguments_of(name: str, folder: Path, **given: Path) -> list[str]:
    """A command line with a separate file for every required path, except those given."""
    words = [name]
    for param in cli.commands[name].params:
        is_path = isinstance(param.type, click.Path)
        if param.name in given:
            value = str(given[param.name])
        elif not param.required:
            continue
        elif is_path:
            value = str(folder / str(param.name))
            Path(value).write_text(param.name or "")
        else:
            value = "1GiB" if param.type is SIZE else param.type.choices[0]
        words += [value] if isinstance(param, click.Argument) else [param.opts[-1], value]
    return words + ["--force"] * ("force" in {p.name for p in cli.commands[name].params})


@pytest.mark.parametrize("number, pair", list(enumerate(PAIRS)))
def test_no_output_is_an_input_or_another_output(tmp_path, monkeypatch, capsys, number, pair):
    """The pairs have, in turns, one name, a relative path, a hard link and a symbolic one."""
    monkeypatch.chdir(tmp_path)
    name, output, other = pair
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("precious")
    how = ("name", "relative", "hard link", "symlink")[number % 4]
    if how == "name":
        two = one
    elif how == "relative":
        two = Path("..", tmp_path.name, "one")
    else:
        (two.symlink_to if how == "symlink" else two.hardlink_to)(one)
    assert main(arguments_of(name, tmp_path, **{output: two, other: one})) == 1
    (line,) = lines_of(capsys)
    assert "is read by this command" in line or "is written twice" in line
    assert one.read_text() == "precious" and two.exists()


# ---- names of files -----------------------------------------------------------------------------

ODD = os.fsdecode(b"\xff\xfe")


@pytest.mark.parametrize("name", [ODD, "n" * 251, "ü" * 125])
def test_every_file_name_that_the_system_accepts_works(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "stderr", TextIOWrapper(BytesIO(), errors="backslashreplace"))
    merge = ["profile", "--merge", *two_profiles(tmp_path), "--force", "-o"]
    assert main([*merge, str(tmp_path / name)]) == 0
    assert main([*merge, str(tmp_path / name)]) == 0
    activations = ["export", str(tmp_path / name), "--format", "powerinfer-activations", "-o"]
    assert main([*activations, str(tmp_path / f"{name}f")]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["a", "b", name, f"{name}f"])


def test_a_name_of_odd_bytes_is_printed(tmp_path):
    make_profile(make_model()).save(tmp_path / ODD)
    for more in ([], ["--json"]):
        result = run(PROGRAM, "inspect", tmp_path / ODD, *more)
        assert result.returncode == 0 and not result.stderr and b"udcff" in result.stdout


@pytest.mark.parametrize("place", ["{}", "{}/x", "x/{}"])
def test_a_name_that_is_too_long_gives_one_line(tmp_path, capsys, place):
    make_profile(make_model()).save(tmp_path / "a")
    name = str(tmp_path / place.format("n" * 300))
    for arguments in (
        ["profile", "--merge", str(tmp_path / "a"), str(tmp_path / "a"), "-o", name, "--force"],
        ["export", str(tmp_path / "a"), "--format", "powerinfer-activations", "-o", name],
        ["inspect", name],
        ["calibrate", "-o", name],
    ):
        assert main(arguments) == 1
        (line,) = lines_of(capsys)
        assert "File name too long" in line or "no such file" in line
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("given", "wanted"), [(None, "passive"), ("active", "active")])
def test_torchs_threads_sleep_unless_the_user_says_otherwise(given, wanted):
    """For every command, and before torch is imported."""
    script = (
        "import os, sys; from hotsplit.cli import main; main(['--version']);"
        "assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == wanted

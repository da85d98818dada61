"""`sparkinfer run` and `sparkinfer cache`: made once, kept, shared, resumed, and removed.

Machines with a GPU are pretended: their figures are models.make_machine's, and the engine runs a
plan on the CPU, which it can."""

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoints import random_dejavu, random_llama
from models import byte_level_keys, make_machine, make_model, make_shape
from test_gguf_source import powerinfer_file

from sparkinfer.cli import main
from sparkinfer.errors import Interrupted, SparkinferError
from sparkinfer.model_file import ModelFile
from sparkinfer.run import choice, corpora, estimate, housekeeping, keys, prepare, stages
from sparkinfer.run.cache_folder import ENTRY, LOCK, Cache, cache_folder, current_version
from sparkinfer.run.choice import Room, Wishes, choose, choose_predictors, choose_type, worth
from sparkinfer.run.keys import identity_of_source, identity_of_texts
from sparkinfer.run.source import look_at

MIB = 1 << 20


@pytest.fixture(scope="session")
def relu(tmp_path_factory) -> Path:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    return random_llama(tmp_path_factory.mktemp("relu") / "relu", **sizes)


@pytest.fixture(scope="session")
def silu(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("silu") / "silu", hidden_act="silu")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own; measurements of the machine are short."""
    monkeypatch.setenv("SPARKINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sparkinfer.run.rates.ENCODE_S", 0.01)
    monkeypatch.setattr("sparkinfer.run.rates.MATMUL_S", 0.01)
    monkeypatch.setattr("sparkinfer.run.rates.UNPACK_S", 0.01)
    monkeypatch.setattr("sparkinfer.run.rates.WRITTEN_BYTES", MIB)
    return tmp_path / "cache"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose memory is as much as --vram says."""

    def room_here(wishes):
        return Room(main=1 << 34, gpus=wishes.vram or ())

    def calibrate(config, on_probe):
        machine = make_machine(launch_s=1e-9, round_trip_s=1e-9, copy_latency_s=1e-9,
                               cpu_gb_per_s=0.01)  # fmt: skip
        machine.save(config.output)
        on_probe(1)
        return machine

    monkeypatch.setattr(prepare, "room_here", room_here)
    monkeypatch.setattr(stages, "calibrate", calibrate)


def run(capsys, *words: object) -> dict:
    """The report of a run that ends well."""
    argv = ["run", *map(str, words), "-p", "the", "-n", "3", "--seed", "0", "--json", "-t", "1"]
    code = main(argv)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return json.loads(shown.out)


def refused(capsys, *words: object) -> str:
    """The line of a run that is refused."""
    capsys.readouterr()
    assert main(["run", *map(str, words)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()[-1]


def made(report: dict) -> list[str]:
    return report["run"]["made"]


def partials(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".partial")]


# ---- made once ----------------------------------------------------------------------------------


def test_a_second_run_makes_nothing_and_says_the_same(capsys, silu, cache):
    first = run(capsys, silu, "--no-verify")
    second = run(capsys, silu)
    assert made(first) == ["model"] and made(second) == []
    assert first["text"] == second["text"] and first["mode"] == "dense"
    assert not partials(cache)


def test_a_converted_model_is_compared_with_its_source(capsys, silu):
    assert main(["run", str(silu), "-p", "the", "-n", "1", "--verify"]) == 0
    assert "verified: logits equal transformers'" in capsys.readouterr().err


def test_a_model_file_of_ours_is_run_where_it_lies(capsys, cache, tmp_path):
    keys_, vocab_size = byte_level_keys()
    model = make_model(shape=make_shape(vocab_size=vocab_size), activation="silu",
                       extra_keys=keys_)  # fmt: skip
    model.save(tmp_path / "m.gguf")
    assert made(run(capsys, tmp_path / "m.gguf")) == []
    assert housekeeping.list_cache(cache) == ()


def test_a_stock_file_becomes_one_of_ours(capsys, silu, tmp_path):
    assert main(["convert", str(silu), "-o", str(tmp_path / "s.gguf"), "--layout", "stock",
                 "--outtype", "q8_0", "--no-verify"]) == 0  # fmt: skip
    report = run(capsys, tmp_path / "s.gguf", "--no-verify")
    assert made(report) == ["model"] and report["run"]["outtype"] == "q8_0"


def test_without_being_asked_a_look_decides(capsys, relu):
    """Half of a random model's neurons fire, and the package's own text is enough for that."""
    report = run(capsys, relu, "--no-verify")
    assert made(report) == ["model", "look"] and report["mode"] == "exact"
    assert made(run(capsys, relu)) == []


def test_a_changed_source_redoes_what_is_made_of_it(capsys, silu, tmp_path):
    own = Path(shutil.copytree(silu, tmp_path / "own"))
    first = run(capsys, own, "--no-verify")
    weights = own / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # the last weight's sign or exponent
    weights.write_bytes(data)
    assert made(run(capsys, own, "--no-verify")) == ["model"]
    shutil.copyfile(silu / "model.safetensors", weights)
    os.utime(weights, ns=(0, (silu / "model.safetensors").stat().st_mtime_ns))
    again = run(capsys, own, "--no-verify")
    assert made(again) == [] and again["text"] == first["text"]


def test_other_text_redoes_the_profile_and_what_follows(capsys, relu, text, tmp_path):
    asked = (relu, "--no-verify", "--mode", "predicted", "--tokens", 1408, "--corpus")
    first = run(capsys, *asked, text)
    assert made(first) == ["model", "profile", "full"] and first["mode"] == "predicted"
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "more\n")
    assert made(run(capsys, *asked, other)) == ["profile", "full"]


def test_a_dense_model_that_does_not_fit_gets_a_plan_by_a_short_look(capsys, silu, text, gpu):
    report = run(capsys, silu, "--corpus", text, "--no-verify", "--vram", "1100KiB", "-c", 32)
    assert made(report) == ["model", "look", "machine", "plan"] and report["mode"] == "dense"


# ---- interrupted --------------------------------------------------------------------------------


def interrupting(monkeypatch, place: str, after: int):
    """Ctrl-C in a stage, after so many calls of what it reports to."""
    count = 0

    def wrapped(function):
        def call(config, *args, **more):
            def tick(*_):
                nonlocal count
                count += 1
                if count > after:
                    raise Interrupted("by hand", signal.SIGINT)

            positions = {"convert": ("on_bytes",), "calibrate": ("on_probe",)}.get(place, ())
            if place == "profile":
                return function(config, tick, *args[1:], **more)
            if positions:
                return function(config, **(more | {positions[0]: tick}))
            tick()
            return function(config, *args, **more)

        return call

    monkeypatch.setattr(stages, place, wrapped(getattr(stages, place)))


FIVE = (  # a stage, how often it reports before Ctrl-C, what the run before that has made
    ("convert", 3, []),
    ("profile", 2, ["model"]),
    ("profile", 9, []),
    ("calibrate", 0, ["profile", "full"]),
    ("solve", 0, ["machine"]),
)


def test_a_run_interrupted_in_five_places_and_then_by_other_budgets(
    monkeypatch, capsys, relu, text, gpu, cache
):
    """Each time the same command goes on; at the end a budget or a context redoes the plan alone."""
    asked = (relu, "--corpus", text, "--no-verify", "--mode", "predicted", "--tokens", 1408)
    short = ("--vram", "1500000B", "-c", 32)
    there: list[str] = []
    for place, after, before in FIVE:
        with monkeypatch.context() as patched:
            interrupting(patched, place, after)
            words = [*map(str, (*asked, *short)), "-p", "the", "-n", "1", "-t", "1"]
            assert main(["run", *words]) == 130, place
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("sparkinfer: interrupted in stage "), place
        assert last.endswith("the same command goes on from there")
        there += before
        ready = [s.kind for s in housekeeping.list_cache(cache) if s.state == "ready"]
        assert sorted(ready) == sorted(there), place
        assert not partials(cache)
    report = run(capsys, *asked, *short)
    assert made(report) == ["plan"] and report["bytes"]["gpu"]["workspace"] > 0
    assert report["mode"] == "predicted"
    assert made(run(capsys, *asked, *short)) == []
    assert made(run(capsys, *asked, "--vram", "1504096B", "-c", 32)) == ["plan"]
    assert made(run(capsys, *asked, "--vram", "1500000B", "-c", 31)) == ["plan"]
    # What only went into others may go: nothing of it is read again.
    assert main(["cache", "clear", "model", "profile", "machine"]) == 0
    assert made(run(capsys, *asked, *short)) == []
    assert housekeeping.clear(cache).kept == ()


def test_a_profile_goes_on_where_it_stood(monkeypatch, capsys, relu, text, cache):
    monkeypatch.setattr("sparkinfer.profile.run.SAVE_SHARE", 1e9)  # saved after every window
    asked = (relu, "--corpus", text, "--no-verify", "--mode", "predicted", "--tokens", 1408)
    profile = stages.profile
    saved = lambda config: dataclasses.replace(config, save_every_s=0.0)  # noqa: E731
    monkeypatch.setattr(stages, "profile", lambda config, *args: profile(saved(config), *args))
    with monkeypatch.context() as patched:
        interrupting(patched, "profile", 12)
        assert main(["run", *map(str, asked), "-p", "the", "-t", "1"]) == 130
    (resume,) = cache.rglob("*.resume")
    (folder,) = {s.name for s in housekeeping.list_cache(cache) if s.state == "unfinished"}
    assert resume.parent.name == folder
    seen = []
    monkeypatch.setattr(stages, "profile", lambda config, tick, *args: profile(
        saved(config), lambda count: (seen.append(count), tick(count)), *args))  # fmt: skip
    run(capsys, *asked)
    assert max(seen) > 3 * 128  # what the first run had done, told at once
    assert not list(cache.rglob("*.resume"))


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [3.0, 5.0, 7.0, 9.0, 11.0])
def test_a_real_ctrl_c_at_any_time(capsys, cache, delay_s):
    """A process of its own, on the bundled model; then the same command, to its end."""
    program = "import sys; from sparkinfer.cli import main; sys.exit(main())"
    source = Path(__file__).parent.parent / "examples" / "tiny-relu"
    words = [source, "--tokens", "6144", "-p", "def", "-n", "3", "--seed", "0", "--json"]
    command = [sys.executable, "-c", program, "run", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (0, 130) and b"Traceback" not in err
    assert not partials(cache)
    done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    assert json.loads(done.stdout)["mode"] == "predicted"


# ---- two at once --------------------------------------------------------------------------------


def test_the_second_of_two_waits_for_the_first(cache):
    said: list[str] = []
    calls: list[Path] = []
    is_making, may_end = threading.Event(), threading.Event()

    def make(folder: Path) -> dict:
        calls.append(folder)
        is_making.set()
        assert may_end.wait(30)
        (folder / "machine.json").write_text("{}")
        return {"by": "the first"}

    def first() -> None:
        with Cache.open() as one:
            one.obtain("machine", {"a": 1}, "here", make)

    thread = threading.Thread(target=first)
    thread.start()
    assert is_making.wait(30)
    threading.Timer(0.2, may_end.set).start()
    with Cache.open(said.append) as two:
        entry = two.obtain("machine", {"a": 1}, "here", make)
    thread.join()
    assert len(calls) == 1 and entry.facts == {"by": "the first"}
    assert said == ["another run is at work on the figures of this machine; waiting for it"]


def test_where_the_first_fails_the_second_does_the_work(cache):
    is_making = threading.Event()

    def fail(folder: Path) -> dict:
        is_making.set()
        time.sleep(0.2)
        raise SparkinferError("no")

    def first() -> None:
        with Cache.open() as one, pytest.raises(SparkinferError):
            one.obtain("machine", {}, "here", fail)

    thread = threading.Thread(target=first)
    thread.start()
    assert is_making.wait(30)
    with Cache.open() as two:
        entry = two.obtain("machine", {}, "here", lambda folder: {"by": "the second"})
        assert entry.facts == {"by": "the second"}
    thread.join()


def test_two_that_only_read_do_not_wait(cache):
    with Cache.open() as one, Cache.open() as two:
        for each in (one, two):
            each.obtain("machine", {}, "here", lambda folder: {})


# ---- refusals -----------------------------------------------------------------------------------


def test_a_full_disk_is_told_before_the_work(monkeypatch, capsys, silu, cache):
    usage = shutil.disk_usage(silu)._replace(free=estimate.SPARE_BYTES + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    line = refused(capsys, silu, "-p", "the")
    assert "are to be made and" in line and "SPARKINFER_CACHE names a folder" in line
    assert housekeeping.list_cache(cache) == ()


def test_a_cache_that_cannot_be_written_is_one_line(monkeypatch, capsys, silu, tmp_path):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("SPARKINFER_CACHE", str(tmp_path / "file"))
    line = refused(capsys, silu, "-p", "the")
    assert "the cache folder cannot be written" in line and "SPARKINFER_CACHE" in line
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("words, told", [
    (["{}", "--mode", "predicted", "-p", "the"], "nothing to predict"),
    (["{}"], "no chat template"),
    (["{}", "-p", ""], "the prompt is empty"),
    (["{}/none", "-p", "the"], "no such folder"),
    (["{}", "-p", "the", "-c", "1000"], "the model has up to 128"),
    (["{}", "-p", "the", "--corpus", "{}/none"], None),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_made(capsys, silu, cache, words, told):
    filled = [word.format(silu) for word in words]
    if told is None:  # a text that a dense model does not read
        assert main(["run", *filled, "-n", "1", "--no-verify"]) == 0
        return
    assert told in refused(capsys, *filled)
    assert housekeeping.list_cache(cache) == ()


def test_a_dry_run_makes_nothing(capsys, relu, cache):
    assert main(["run", str(relu), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [work["kind"] for work in plan["stages"]] == ["model", "look", "profile", "full"]
    assert plan["num_bytes"] > 0 < plan["seconds"] and housekeeping.list_cache(cache) == ()


# ---- the cache ----------------------------------------------------------------------------------


def filled(cache: Path, count: int = 1) -> list[Path]:
    """Artifacts of a kind; their folders."""
    folders = []
    with Cache.open() as each:
        for number in range(count):
            entry = each.obtain("machine", {"n": number}, f"source {number}", _write_machine)
            folders.append(entry.folder)
    return folders


def _write_machine(folder: Path) -> dict:
    (folder / "machine.json").write_text("{}")
    return {}


def test_what_another_version_made_is_not_used_and_is_stale(monkeypatch, cache):
    (old,) = filled(cache)
    newer = dataclasses.replace(keys.STAGES["machine"], version=(99,))
    monkeypatch.setitem(keys.STAGES, "machine", newer)
    (new,) = filled(cache)
    assert new != old and current_version("machine")[-1] == 99
    states = {s.name: s.state for s in housekeeping.list_cache(cache)}
    assert states == {old.name: "stale", new.name: "ready"}
    assert housekeeping.clear(cache, stale_only=True).removed == (old.name,)


def test_a_cut_artifact_is_made_again(cache):
    (folder,) = filled(cache)
    (folder / "machine.json").write_text("{")
    assert housekeeping.list_cache(cache)[0].state == "unfinished"
    filled(cache)
    assert (folder / "machine.json").read_text() == "{}"


def test_a_damaged_entry_is_made_again(cache):
    for content in ("", "{", "[]", "null", '{"format": 1}', "[" * 100_000):
        (folder,) = filled(cache)
        (folder / ENTRY).write_text(content)
        assert housekeeping.list_cache(cache)[0].state == "unfinished"
    (folder,) = filled(cache)
    assert json.loads((folder / ENTRY).read_text())["format"] == "sparkinfer.cache-entry"


def test_what_is_in_use_stays(cache):
    with Cache.open() as each:
        used = each.obtain("machine", {}, "here", _write_machine)
        idle = filled(cache, 2)
        assert [s.is_in_use for s in housekeeping.list_cache(cache) if s.name == used.folder.name]
        cleared = housekeeping.clear(cache)
        assert cleared.kept == ((used.folder.name, "in use"),)
        assert sorted(cleared.removed) == sorted(folder.name for folder in idle)
        assert used.path("machine.json").read_text() == "{}"
    assert housekeeping.clear(cache).removed == (used.folder.name,)


def test_what_is_not_ours_stays(cache, tmp_path):
    (folder,) = filled(cache)
    (folder / "notes.txt").write_text("mine")
    (folder / "sub").mkdir()
    (folder / "sub" / "machine.json").write_text("mine")
    digits = "0123456789abcdef01234567"
    other = cache / f"model-{digits}"  # named like one, and without a lock or an entry
    other.mkdir()
    (other / "model.gguf").write_text("mine")
    outside = tmp_path / "outside"
    shutil.copytree(filled(cache)[0], outside)
    (cache / f"plan-{digits}").symlink_to(outside)
    (cache / "readme").write_text("mine")
    cleared = housekeeping.clear(cache)
    assert cleared.removed == () and "is not ours" in cleared.kept[0][1]
    assert not (folder / ENTRY).exists() and not (folder / "machine.json").exists()
    for path in (folder / "notes.txt", folder / "sub" / "machine.json", other / "model.gguf",
                 cache / "readme"):  # fmt: skip
        assert path.read_text() == "mine"
    assert (outside / "machine.json").read_text() == "{}"


def test_a_folder_that_goes_while_it_is_waited_for_is_made_anew(monkeypatch, cache):
    """Between the opening of a lock and the locking another run removes both."""
    real, taken = fcntl.flock, []

    def flock(descriptor, how):
        if not taken:
            taken.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            shutil.rmtree(Path(taken[0]).parent)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    (folder,) = filled(cache)
    assert taken and (folder / LOCK).exists() and (folder / "machine.json").exists()


def test_the_command_lists_and_clears(capsys, cache):
    one, two = filled(cache, 2)
    assert main(["cache", "list"]) == 0
    shown = capsys.readouterr()
    assert "source 0" in shown.out and one.name in shown.out and "2 in" in shown.err
    assert main(["cache", "list", "--json"]) == 0
    assert {e["source"] for e in json.loads(capsys.readouterr().out)["entries"]} == {
        "source 0", "source 1",
    }  # fmt: skip
    assert main(["cache", "clear", "source 1"]) == 0
    assert one.exists() and not two.exists()
    assert main(["cache", "clear", "nothing"]) == 1
    assert "nothing in" in capsys.readouterr().err.splitlines()[-1]
    assert main(["cache", "clear"]) == 0 and not one.exists()
    shutil.rmtree(cache)
    assert main(["cache", "list"]) == 0 and main(["cache", "clear"]) == 0
    assert not cache.exists()


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARKINFER_CACHE", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("SPARKINFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "sparkinfer"
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / ".cache" / "sparkinfer"


# ---- keys ---------------------------------------------------------------------------------------


def test_a_source_is_known_by_what_it_holds(silu, tmp_path):
    known = identity_of_source(silu)
    moved = Path(shutil.copytree(silu, tmp_path / "moved"))
    assert identity_of_source(moved) == known
    (moved / "notes.md").write_text("not read by convert")
    assert identity_of_source(moved) == known
    (moved / "config.json").write_text((moved / "config.json").read_text() + "\n")
    assert identity_of_source(moved) != known


def test_a_large_file_is_known_by_samples_and_its_time(monkeypatch, tmp_path):
    monkeypatch.setattr(keys, "SMALL_BYTES", 1 << 10)
    path = tmp_path / "big.txt"
    path.write_bytes(bytes(1 << 20))
    os.utime(path, ns=(0, 1))
    known = identity_of_texts([path])
    with path.open("r+b") as file:
        file.seek(5000)  # between two samples
        file.write(b"x")
    assert identity_of_texts([path]) != known
    os.utime(path, ns=(0, 1))
    assert identity_of_texts([path]) == known  # what nobody but a forger of times does
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(0, 1))
    assert identity_of_texts([path]) != known


# ---- choices ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(silu, tmp_path_factory):
    return look_at(silu, None, tmp_path_factory.mktemp("s") / "none.gguf")


def size(source, kind) -> int:
    return choice.run_bytes(source.draft(kind), 128)


def test_the_type_is_the_one_that_loses_least_of_those_that_fit(source):
    """Rows of 64 values are no blocks of K-quants: those stay f16, and larger than q8_0."""
    for room, kind in (
        (Room(main=size(source, "q8_0")), "q8_0"),
        (Room(main=size(source, "q8_0") - 1), "q4_0"),
        (Room(main=size(source, "q8_0") - MIB, gpus=(MIB,)), "q8_0"),
        (Room(main=1 << 40, gpus=(size(source, "q4_0"),)), "q4_0"),  # whole on the GPU
        (Room(main=1 << 40, gpus=(size(source, "q4_0") - 1,)), "q8_0"),
    ):
        assert choose_type(source, Wishes(), room)[0] == kind, room
    kind, line = choose_type(source, Wishes(), Room(main=1000))
    assert kind == "q4_0" and "more than the 1000 B of memory" in line
    assert choose_type(source, Wishes(outtype="f16"), Room(main=0))[0] == "f16"


def test_what_needs_a_plan(source):
    fits = size(source, "q8_0")
    for gpus, budgets, device in (
        ((), (), "cpu"), ((fits,), (), None), ((fits - 1,), (fits - 1,), None),
        ((MIB,), (), "cpu"),
    ):  # fmt: skip
        found = choose(source, Wishes(outtype="q8_0"), Room(main=1 << 40, gpus=gpus))
        assert (found.budgets, found.device) == (budgets, device), gpus
    short = Wishes(outtype="q8_0", context_length=32, vram=(2_000_000,))
    found = choose(source, short, Room(main=1 << 40, gpus=(2_000_000,)))
    assert (found.budgets, found.device) == ((2_000_000,), None)
    assert "a plan for 1.91 MiB of VRAM" in found.lines[-1]


def test_which_models_are_looked_at():
    cases = (
        ("silu", Wishes(), False, False),
        ("relu", Wishes(), False, None),
        ("relu", Wishes(), True, False),
        ("relu", Wishes(mode="exact"), False, False),
        ("relu", Wishes(mode="predicted"), True, True),
    )
    for activation, wishes, is_on_gpu, wanted in cases:
        model = make_model(activation=activation)
        found, line = choose_predictors(model, wishes, is_on_gpu=is_on_gpu)
        assert found is wanted and line, (activation, wishes)
    has_some = make_model(predictor_rank=8)
    assert choose_predictors(has_some, Wishes(), is_on_gpu=False)[0] is False


def test_predictors_are_worth_it_where_few_neurons_fire():
    model = make_model(shape=make_shape(num_neurons=1024), kind="f16")
    assert worth(model, 0.05, has_plan=False)[0] and not worth(model, 0.6, has_plan=False)[0]
    wide = make_model(shape=make_shape(num_neurons=32, vocab_size=4096), kind="f16")
    assert worth(wide, 0.05, has_plan=True)[0] and not worth(wide, 0.05, has_plan=False)[0]
    assert choice.bytes_predicted(model, 0.05) < choice.bytes_exact(model, 0.05)


def test_powerinfers_files_are_run_as_they_are(relu, tmp_path):
    sizes = {"num_layers": 2, "width": 32, "num_neurons": 64}
    stages.convert(stages.ConvertConfig(source=relu, output=tmp_path / "m.gguf", outtype="f32"))
    random_dejavu(tmp_path / "p", **sizes)
    path = tmp_path / "m.powerinfer.gguf"
    powerinfer_file(path, ModelFile.load(tmp_path / "m.gguf"), "llama", tmp_path / "p")
    found = choose(look_at(path, None, tmp_path / "none.gguf"), Wishes(), Room(main=1 << 40))
    assert not found.is_converted and found.predictors is False and not found.budgets
    assert "the file has predictors" in found.lines[1]


# ---- estimates ----------------------------------------------------------------------------------


def job_of(relu, **wishes):
    cache = Cache.open()
    given = look_at(relu, None, cache.folder / "none.gguf")
    return prepare.job_of(given, Wishes(**wishes), (), cache)


def test_what_was_measured_is_what_is_estimated(relu):
    job = job_of(relu, tokens=1000, mode="predicted")
    flop = stages.flop_per_token(job.choice.model)
    job.rates.stored |= {"count": 100 * flop, "train": 10 * flop, "write": 1e9}
    job.rates.stored[stages.conversion_name(job)] = 1e4
    works = {work.kind: work for work in prepare.estimate_of(job).works}
    assert works["profile"].seconds == pytest.approx(100)
    assert works["model"].seconds == pytest.approx(works["model"].num_bytes / 1e4)
    written = stages.ConvertConfig(source=relu, output=job.cache.folder / "m.gguf",
                                   outtype="q8_0")  # fmt: skip
    stages.convert(written)
    size = sum(entry.num_bytes for entry in ModelFile.load(written.output).tensors.values())
    assert works["model"].num_bytes == size


def test_patience_says_how_many_tokens(relu):
    job = job_of(relu)
    rate = 131_072 * estimate.TRAIN_FACTOR / estimate.PATIENCE_S
    for per_s, tokens in ((rate, 131_072), (rate / 2.1, 32_768), (rate / 9, None)):
        assert estimate.tokens_for(job, per_s) == tokens
    asked = job_of(relu, mode="predicted")
    assert estimate.tokens_for(asked, rate / 9) == 16_384
    assert estimate.tokens_for(job_of(relu, tokens=77), 1.0) == 77


def test_a_look_that_would_only_say_no_is_left_out(capsys, relu, monkeypatch):
    monkeypatch.setattr("sparkinfer.run.estimate.matmul_flops", lambda device: 1e6)
    assert main(["run", str(relu), "-p", "the", "-n", "1", "--no-verify"]) == 0
    shown = capsys.readouterr().err
    assert (
        "mode exact: predictors would take about" in shown
        and "look" not in shown.split("stage")[-1]
    )
    assert main(["run", str(relu), "--dry-run", "--mode", "predicted"]) == 0
    assert "look about" in capsys.readouterr().err


def test_rates_are_kept_for_the_next_time(relu):
    job = job_of(relu)
    job.rates.note("count", 5.0)
    assert job_of(relu).rates.stored["count"] == 5.0
    job.rates.path.write_text("{")
    assert "count" not in job_of(relu).rates.stored


@pytest.mark.parametrize("seconds, text", [
    (3, "seconds"), (31, "about 30 s"), (130, "about 2 min"), (7200, "about 2.0 h"),
])  # fmt: skip
def test_times_as_people_say_them(seconds, text):
    assert estimate.words(seconds) == text


# ---- the package's text -------------------------------------------------------------------------


def test_the_packages_text_is_there_with_its_notice(cache):
    with Cache.open() as each:
        (path,) = corpora.files((), each)
        found = path.read_text(encoding="utf-8")
    assert len(found) == 1_019_278 and "Alice was beginning to get very tired" in found
    assert corpora.PACKED.stat().st_size < 300_000
    notice = corpora.PACKED.with_name("NOTICE.md").read_text()
    assert "PSF License Version 2" in notice and f"{len(found):,} characters" in notice

"""Interrupted and resumed runs, several processes, and merged profiles.
The oracle is the same run, uninterrupted and in one process."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked, run_command
from models import changed, make_model, make_profile, make_sizes
from test_profile_corpus import text_of

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.errors import HotsplitError, Interrupted
from hotsplit.files.safetensors_file import load_arrays, save_arrays
from hotsplit.model.spec import Neurons
from hotsplit.profile.collect import profile
from hotsplit.profile.count import run as run_module
from hotsplit.profile.count.merge import MergeConfig, merge
from hotsplit.profile.profile_config import ProfileConfig
from hotsplit.runtime.kernels.cpu import library

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def files(tmp_path, codec_model):
    (tmp_path / "t.txt").write_text(text_of(0, 12_000))
    return tmp_path


def config(files, output, **options):
    return ProfileConfig(
        **{
            "model": files / "codec.gguf",
            "corpora": (files / "t.txt",),
            "output": files / output,
            "max_tokens": 6000,
            **options,
        }
    )


def training(files, output):
    return {"train_predictors": files / f"{output}-pred", "predictor_rank": 32}


def same_profile(a, b, *, has_same_predictors=True):
    a, b = Profile.load(a), Profile.load(b)
    if not has_same_predictors:  # a profile records the quality that they give
        a, b = (dataclasses.replace(p, quality={}) for p in (a, b))
    return (
        (a.active_count_LF == b.active_count_LF).all()
        and (a.gate_histogram_LB == b.gate_histogram_LB).all()
        and dataclasses.replace(a, active_count_LF=None, gate_histogram_LB=None)
        == dataclasses.replace(b, active_count_LF=None, gate_histogram_LB=None)
    )


def same_predictors(a, b, rtol=0.0):
    a, b = (Predictors.load(path / "predictors.safetensors") for path in (a, b))
    return a.info.rank_L == b.info.rank_L and all(
        np.allclose(x, y, rtol=rtol, atol=rtol)
        for p, q in zip(a.layers, b.layers, strict=True)
        for x, y in zip(p.arrays(0).values(), q.arrays(0).values(), strict=True)
    )


def stopped_at(monkeypatch, window):
    """Stops a run with SIGTERM after this many windows; None: never. Later runs are not stopped,
    but their windows are counted too: the returned list holds the number of windows of all runs."""
    original, seen = run_module.ResumableRun._pause, [0]

    def pause(self, *, ends_phase):
        seen[0] += 1
        if seen[0] == window:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, ends_phase=ends_phase)

    monkeypatch.setattr(run_module.ResumableRun, "_pause", pause)
    return seen


def test_a_run_stopped_anywhere_resumes_to_the_same_result(files, monkeypatch):
    """Bit for bit. The run has 94 windows: 9 for the moments, 2 kept, 68 for training, 9 to
    measure, 6 to examine."""
    profile(config(files, "whole", **training(files, "whole")))
    for window in (9, 10, 45, 82, 90):
        cut = f"cut{window}"
        with monkeypatch.context() as patched:
            seen = stopped_at(patched, window)
            with pytest.raises(Interrupted, match="continues from there"):
                profile(config(files, cut, **training(files, cut)))
            assert not (files / cut).exists() and (files / f"{cut}.resume").exists()
            profile(config(files, cut, **training(files, cut)))
        assert seen[0] == 94  # no window was run twice
        assert same_profile(files / "whole", files / cut)
        assert same_predictors(files / "whole-pred", files / f"{cut}-pred")
        assert not (files / f"{cut}.resume").exists()
    profile(config(files, "other", seed=1, **training(files, "other")))
    assert not same_profile(files / "whole", files / "other")
    assert not same_predictors(files / "whole-pred", files / "other-pred")


def test_a_killed_run_resumes(files):
    """kill -9 as soon as there is a resume file; the counts equal those of an uninterrupted run."""
    profile(config(files, "whole"))
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from hotsplit.profile.count import run\n"
        "from hotsplit.profile.collect import profile\n"
        "from hotsplit.profile.profile_config import ProfileConfig\n"
        "original, f = run.ResumableRun._pause, Path(sys.argv[1])\n"
        "run.ResumableRun._pause = lambda self, **rest: (original(self, **rest), time.sleep("
        "600 if (f / 'cut.resume').exists() else 0.01))[0]\n"
        "profile(ProfileConfig(model=f / 'codec.gguf', corpora=(f / 't.txt',),"
        " output=f / 'cut', max_tokens=6000, save_every_s=0.05))\n"
    )
    process = Forked([str(files)], (0, 1, 2), code=script, server="command")
    while not (files / "cut.resume").exists():
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (files / "cut").exists()
    ran = []
    report = profile(config(files, "cut"), ran.append)
    assert report.num_tokens == 6000 == sum(ran)
    assert ran[0] > 0  # the work done before, reported at once
    assert same_profile(files / "whole", files / "cut")
    assert not list(files.glob("cut.resume*"))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"seed": 1}, "windows|seed 0, this run has 1"),
        ({"max_tokens": 5000}, "begun with tokens 6000, this run has 5000"),
        ({"train_predictors": True}, "begun with training false, this run has true"),
    ],
)
def test_the_resume_file_of_another_run_is_refused(files, monkeypatch, change, words):
    stopped_at(monkeypatch, 5)
    with pytest.raises(Interrupted):
        profile(config(files, "cut"))
    if "train_predictors" in change:
        change = training(files, "cut")
    with pytest.raises(HotsplitError, match=words) as refused:
        profile(config(files, "cut", **change))
    assert "--force" in str(refused.value)
    assert (files / "cut.resume").exists()
    profile(config(files, "cut", force=True, **change))
    profile(config(files, "whole", **change | (training(files, "w") if len(change) > 1 else {})))
    assert same_profile(files / "whole", files / "cut")


@pytest.mark.skipif(len(library.usable_levels()) == 1, reason="this processor has one level")
def test_a_run_resumes_only_with_the_arithmetic_that_it_began_with(files, monkeypatch):
    stopped_at(monkeypatch, 5)
    with pytest.raises(Interrupted):
        profile(config(files, "cut"))
    level = next(name for name in library.usable_levels() if name != library.level())
    library.set_level(level)
    with pytest.raises(HotsplitError, match=f'begun with arithmetic .*, this run has "{level},'):
        profile(config(files, "cut"))
    profile(config(files, "cut", force=True))
    assert Profile.load(files / "cut").arithmetic.startswith(f"{level}, torch ")


def test_counts_do_not_depend_on_the_number_of_threads(files):
    """If they did, a run could only be resumed with the same number of threads."""
    for name, threads in (("one", 1), ("three", 3)):
        torch.set_num_threads(threads)
        library.set_threads(threads)
        profile(config(files, name))
    assert same_profile(files / "one", files / "three")


def test_a_damaged_resume_file_is_refused(files):
    (files / "p.resume").write_bytes(b"nonsense" * 10)
    with pytest.raises(HotsplitError, match="not a whole safetensors file.*delete it"):
        profile(config(files, "p"))


@pytest.mark.parametrize("change", ["done", "phase", "counts", "missing"])
def test_a_resume_file_of_other_contents_is_refused(files, monkeypatch, change):
    """A valid resume file of this run with changed contents could give wrong counts unnoticed."""
    stopped_at(monkeypatch, 5)
    with pytest.raises(Interrupted):
        profile(config(files, "cut"))
    path = files / "cut.resume"
    metadata, arrays = load_arrays(path, "hotsplit.resume", 1)
    if change in metadata:
        metadata[change] += 3
    elif change == "counts":
        arrays["counter/active_count_LF"][1, 3] ^= 1
    else:
        del arrays["counter/num_tokens"]
    save_arrays(path, "hotsplit.resume", 1, metadata, arrays)
    with pytest.raises(HotsplitError, match="is damaged .* delete it"):
        profile(config(files, "cut"))
    assert not (files / "cut").exists() and not (files / "cut.report.json").exists()


def test_the_resume_file_of_other_thresholds_is_refused(tmp_path, codec_model, monkeypatch):
    """Two model files of one checkpoint and of the same size, with different thresholds."""
    (tmp_path / "t.txt").write_text(text_of(0, 12_000))
    model = ModelFile.load(codec_model)
    spec = changed(model.bare_spec, Neurons, activation="fatrelu")
    fatrelu = dataclasses.replace(model, bare_spec=spec)
    for name, threshold in (("a", 0.05), ("b", 0.2)):
        thresholds = (threshold,) * model.spec.num_layers
        dataclasses.replace(fatrelu, threshold_L=thresholds).save(tmp_path / name)
    stopped_at(monkeypatch, 5)
    one = ProfileConfig(
        model=tmp_path / "a", corpora=(tmp_path / "t.txt",), output=tmp_path / "p", max_tokens=4000
    )
    with pytest.raises(Interrupted):
        profile(one)
    assert (tmp_path / "a").stat().st_size == (tmp_path / "b").stat().st_size
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(HotsplitError, match="begun with thresholds of the model .*0.05"):
        profile(one)


def killing(original, number=signal.SIGINT, when=lambda *args: True):
    """The function, which first sends this process a signal when `when` holds for its arguments."""

    def function(*args, **options):
        if when(*args):
            os.kill(os.getpid(), number)
        return original(*args, **options)

    return function


def test_a_signal_between_phases_ends_at_once_and_loses_no_window(files, monkeypatch):
    from hotsplit.profile.predictors import train as predictor_training

    profile(config(files, "whole", **training(files, "whole")))
    seen = stopped_at(monkeypatch, None)
    with monkeypatch.context() as patched:
        trainer = predictor_training.LayerTrainer
        at_training = killing(trainer.enter, when=lambda self, phase, *rest: phase == "train")
        patched.setattr(trainer, "enter", at_training)
        with pytest.raises(Interrupted, match="cut.resume holds the work so far"):
            profile(config(files, "cut", **training(files, "cut")))
    assert seen[0] == 11
    profile(config(files, "cut", **training(files, "cut")))
    assert seen[0] == 94  # no window was run twice
    assert same_profile(files / "whole", files / "cut")
    assert same_predictors(files / "whole-pred", files / "cut-pred")


def test_a_signal_before_anything_is_saved_says_so(files, monkeypatch):
    from hotsplit.profile import collect

    monkeypatch.setattr(collect, "train", killing(collect.train))
    with pytest.raises(Interrupted, match="nothing was saved yet"):
        profile(config(files, "cut", **training(files, "cut")))
    assert not list(files.glob("cut*"))


def test_a_signal_in_the_final_measurement_loses_only_that(files, monkeypatch):
    from hotsplit.profile import collect

    want = profile(config(files, "whole", **training(files, "whole")))
    seen = stopped_at(monkeypatch, None)
    with monkeypatch.context() as patched:
        patched.setattr(collect, "measure", killing(collect.measure))
        with pytest.raises(Interrupted, match="cut.resume holds the work so far"):
            profile(config(files, "cut", **training(files, "cut")))
    before = seen[0]
    assert before > 0
    got = profile(config(files, "cut", **training(files, "cut")))
    assert seen[0] == before and got.quality == want.quality
    assert same_profile(files / "whole", files / "cut")
    assert not (files / "cut.resume").exists()


def test_a_signal_while_the_end_of_the_last_phase_is_saved_is_not_lost(files, monkeypatch):
    def is_end(path, settings, position):
        return position.done == num_windows

    seen = stopped_at(monkeypatch, None)
    profile(config(files, "whole"))
    num_windows = seen[0]
    with monkeypatch.context() as patched:
        saving = killing(run_module.save_position, when=is_end)
        patched.setattr(run_module, "save_position", saving)
        with pytest.raises(Interrupted, match="cut.resume holds the work so far"):
            profile(config(files, "cut"))
    profile(config(files, "cut"))
    assert seen[0] == 2 * num_windows
    assert same_profile(files / "whole", files / "cut")


def test_two_processes_take_the_same_steps(monkeypatch):
    """Threads stand in for the processes. They have different texts, one shorter than the other;
    their weights are bit-identical after the last step."""
    import threading

    from test_predictors import RELU, batch_of, inputs, start_of, weights

    from hotsplit.costs.pass_length import SHORT_CHUNK
    from hotsplit.profile.predictors.low_rank import LowRankNetwork
    from hotsplit.profile.predictors.train import SharedSteps

    gate_FD, barrier, shared = weights(96, 64), threading.Barrier(2), {}

    class Ranks:
        size = 2

        def __init__(self, rank):
            self.rank = rank

        def sum(self, tensor):
            shared[self.rank] = tensor.clone()
            barrier.wait()
            total = shared[0] + shared[1]
            barrier.wait()
            return total

    def run(rank, lengths, found):
        torch.set_num_threads(1)
        network = LowRankNetwork(start_of(gate_FD, inputs(2000)), 8, RELU)
        network.begin(8, batch_of(inputs(64, 3), gate_FD))
        layer = type("Layer", (), {"trained": network})()
        steps = SharedSteps(Ranks(rank), [layer])
        for turn in range(2):
            with steps.round(lengths):
                for start in range(0, lengths[rank], SHORT_CHUNK):
                    size = min(SHORT_CHUNK, lengths[rank] - start)
                    network.step(batch_of(inputs(size, 10 * rank + turn + start), gate_FD))
        found[rank] = network

    found = {}
    lengths = (2 * SHORT_CHUNK, SHORT_CHUNK - 5)
    threads = [threading.Thread(target=run, args=(rank, lengths, found)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0].steps == found[1].steps == 4
    for mine, other in zip(found[0].state().values(), found[1].state().values(), strict=True):
        assert torch.equal(mine, other)
    alone = LowRankNetwork(start_of(gate_FD, inputs(2000)), 8, RELU)
    assert not torch.equal(alone.up_FR, found[0].up_FR)


# ---- several processes -----------------------------------------------------------------------


def two_ranks(files, *args):
    program = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "hotsplit",
        "profile",
    ]
    text = [files / "codec.gguf", "--corpus", files / "t.txt", "--tokens", "6000"]
    words = [sys.executable, *program, *map(str, (*text, *args))]
    return subprocess.run(words, env=ENV, capture_output=True, text=True, timeout=900)


def test_two_processes_give_the_counts_of_one(files):
    """The counts are equal. The predictors, trained in half as many steps, name about as many
    neurons."""
    one = profile(config(files, "one", **training(files, "one")))
    done = two_ranks(
        files, "-o", files / "two", "--train-predictors", files / "two-pred", "--predictor-rank", 32
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens, density") == 1
    assert same_profile(files / "one", files / "two", has_same_predictors=False)
    two = Predictors.load(files / "two-pred" / "predictors.safetensors")
    named = np.array([q.chosen.predicted_density for q in one.quality_L])
    assert np.allclose(two.info.density_L, named, atol=0.1)
    assert not list(files.glob("*.resume"))


def test_an_error_of_several_processes_is_printed_once(files):
    done = two_ranks(files, "-o", files / "t.txt", "--force")
    assert done.returncode != 0
    assert done.stderr.count("give the output another name") == 1


# ---- merge -----------------------------------------------------------------------------------


def test_halves_of_a_text_add_up_to_the_whole(files):
    data = text_of(1, 6000, ["ab\n", "cd e\n"]).encode()[: 3 * 8192]
    half = data.index(b"\n", 8192 - 1) + 1
    (files / "a.txt").write_bytes(data[:half])
    (files / "b.txt").write_bytes(data[half : 2 * half])
    for name, texts in (("a", "a"), ("b", "b"), ("ab", "ab")):
        corpora = tuple(files / f"{t}.txt" for t in texts)
        profile(config(files, name, corpora=corpora, max_tokens=None))
    report = merge(MergeConfig(profiles=(files / "a", files / "b"), output=files / "sum"))
    found, want = Profile.load(files / "sum"), Profile.load(files / "ab")
    assert report.num_tokens == found.num_tokens == want.num_tokens
    assert [c.name for c in found.corpora] == ["a.txt", "b.txt"]
    assert (found.active_count_LF == want.active_count_LF).all()
    assert (found.gate_histogram_LB == want.gate_histogram_LB).all()


def saved(folder: Path, name: str, profile_: Profile, sha: str) -> Path:
    corpora = (dataclasses.replace(profile_.corpora[0], sha256=sha * 64),)
    dataclasses.replace(profile_, corpora=corpora).save(folder / name)
    return folder / name


def test_profiles_that_do_not_add_up_are_refused(tmp_path):
    model = make_model()
    a = saved(tmp_path, "a", make_profile(model), "a")
    alike = saved(tmp_path, "alike", make_profile(model), "a")
    other = saved(tmp_path, "other", make_profile(make_model(seed=1)), "b")
    threshold = dataclasses.replace(make_profile(model), threshold_L=(0.0, 0.5))
    threshold = saved(tmp_path, "threshold", threshold, "c")
    wide = make_profile(make_model(sizes=make_sizes(num_neurons=128)))
    wide = saved(tmp_path, "wide", dataclasses.replace(wide, model_id=model.model_id), "d")
    for second, words in (
        (other, "profiles of two models"),
        (wide, "profiles of two models"),
        (threshold, "layer 1 was counted above 0 and above 0.5"),
        (alike, "both count synthetic"),
    ):
        with pytest.raises(HotsplitError, match=words):
            merge(MergeConfig(profiles=(a, second), output=tmp_path / "out"))
        assert not (tmp_path / "out").exists()
    for profiles, words in (((), "^no profiles to merge"), ((a,), "^one profile to merge")):
        with pytest.raises(HotsplitError, match=f"{words}, wanted two or more"):
            MergeConfig(profiles=profiles, output=tmp_path / "out")
    report = merge(MergeConfig(profiles=(a, alike), output=tmp_path / "out", force=True))
    assert "counted twice" in report.notes[0]


def test_the_merge_command(tmp_path):
    model = make_model()
    paths = [saved(tmp_path, n, make_profile(model, num_tokens=100), n) for n in "abc"]
    done = run_command("profile", "--merge", *paths, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "300 tokens of 3 profiles" in done.stderr
    assert Profile.load(tmp_path / "out").num_tokens == 300


# The whole program, with the thread that watches for signals. Its third window waits between two
# lines on stdout, so that it takes as long as one of a large model.
SLOW_WINDOWS = """
import sys, time
from hotsplit.cli import main
from hotsplit.profile.count import run
hidden = run.Engine.hidden
def slowly(self, tokens):
    hidden(self, tokens)
    slowly.count += 1
    if slowly.count == 3:
        print("ready", flush=True)
        for _ in range(SLICES):
            time.sleep(0.05)
        print("over", flush=True)
slowly.count = 0
run.Engine.hidden = slowly
sys.exit(main())
"""


def profile_in_slow_windows(
    files, seconds: float, *times: tuple[float, int]
) -> tuple[int, str, bool]:
    """(exit code, stderr, whether the window ended) of a profile whose third window waits for this
    many seconds. `times` are pairs: seconds after its beginning, and the signal that is sent then,
    if the process has not ended."""
    code = SLOW_WINDOWS.replace("SLICES", str(round(seconds / 0.05)))
    words = f"profile codec.gguf --corpus t.txt -o {files}/cut --tokens 6000".split()
    words[1], words[3] = files / words[1], files / words[3]
    (read, out), (read_error, error) = os.pipe(), os.pipe()
    process = Forked([*map(str, words)], (0, out, error), code=code, server="command")
    os.close(out)
    os.close(error)
    with os.fdopen(read) as printed, os.fdopen(read_error) as log:
        assert printed.readline() == "ready\n"
        began = time.monotonic()
        for after, number in times:
            time.sleep(max(0.0, began + after - time.monotonic()))
            with suppress(ProcessLookupError):
                process.send_signal(number)
        return process.wait(600), log.read(), "over" in printed.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_a_long_window_loses_nothing(files, number):
    """The signal is sent twice, as shells and `timeout` do."""
    code, error, _ = profile_in_slow_windows(files, 1.0, (0.0, number), (0.3, number))
    assert code == 128 + number, error
    line = f"{files}/cut.resume holds the work so far; the same command continues from there"
    assert error.splitlines()[-1] == f"hotsplit: interrupted; {line}"
    assert not (files / "cut").exists()
    mask = os.umask(0)
    os.umask(mask)
    assert (files / "cut.resume").stat().st_mode & 0o777 == 0o666 & ~mask
    profile(config(files, "whole"))
    counts = []
    profile(config(files, "cut"), on_tokens=counts.append)
    assert counts[0] == 3 * counts[1] > 0  # the three windows are not run again
    assert same_profile(files / "whole", files / "cut")


def test_a_second_signal_does_not_wait_for_the_window(files):
    signals = (0.0, signal.SIGINT), (2.5, signal.SIGINT)
    code, error, has_ended = profile_in_slow_windows(files, 60.0, *signals)
    assert code == 130 and not has_ended
    assert error.splitlines()[-1] == "hotsplit: interrupted; nothing half-written was left"
    assert not (files / "cut.resume").exists()

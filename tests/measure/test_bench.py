"""bench: its bytes against the file's tensor table, its parts against the clock, its report."""

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_cases import config_of
from gguf import GGUFReader
from models import make_model, make_sizes

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry
from hotsplit.measure.bench import runner
from hotsplit.measure.bench.bench import bench
from hotsplit.measure.bench.bench_config import BenchTest
from hotsplit.measure.bench.bench_tables import lines_of, to_json
from hotsplit.measure.bench.parts import (
    CACHE,
    COLD,
    HEAD,
    HOT,
    NEURONS,
    PREDICTOR,
    bytes_by_part,
    part_ns,
)
from hotsplit.measure.bench.result import RunTimes
from hotsplit.measure.bench.runner import BenchRunner, Sample, cpu_bandwidth
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.step.native_step import PARTS, timed_parts

pytest_plugins = ("bench_fixtures",)


def sample_of(engine: Engine, test: BenchTest) -> Sample:
    runner = BenchRunner(engine)
    runner.go_to(list(range(3, 3 + test.depth)))
    sample = runner.run(test, list(range(7, 7 + test.length)))
    runner.close()
    return sample


@contextmanager
def planned(folder: Path) -> Iterator[tuple[Split, Engine, Sample]]:
    """A plan, an engine that runs it on the CPU in mode dense, and a sample of six steps."""
    plan = Split.load(folder / "plan.gguf")
    with Engine.load(
        folder / "predicted.gguf", folder / "plan.gguf", device="cpu", mode="dense"
    ) as engine:
        yield plan, engine, sample_of(engine, BenchTest(kind="tg", length=6))


# ---- bytes --------------------------------------------------------------------------------------


def by_hand(path: Path, start: int, count: int) -> float:
    """The mean bytes that a dense step reads per token, from the tensor table of the gguf
    package."""
    reader = GGUFReader(path)
    total = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    embedding = next(t for t in reader.tensors if t.name == "token_embd.weight")
    row = int(embedding.n_bytes) // int(embedding.shape[1])
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    read = total + row if is_tied else total - int(embedding.n_bytes) + row
    read -= sum(int(t.n_bytes) for t in reader.tensors if ".ffn_pred_" in t.name)
    key = next(t for t in reader.tensors if t.name == "blk.0.attn_k.weight")
    num_layers = sum(t.name.endswith("attn_k.weight") for t in reader.tensors)
    a_position = 2 * num_layers * int(key.shape[1]) * 2  # keys and values of all heads in f16
    positions = statistics.mean(range(start + 1, start + count + 1))
    return read + positions * a_position


@pytest.mark.parametrize("name", ["dense.gguf", "predicted.gguf"])
@pytest.mark.parametrize("depth", [0, 9])
def test_bytes_are_those_of_the_tensor_table(bench_files, name, depth):
    with Engine.load(bench_files / name, mode="dense", device="cpu") as engine:
        sample = sample_of(engine, BenchTest(kind="tg", length=6, depth=depth))
        read = bytes_by_part(engine, None, sample.steps)
    assert read.total == by_hand(bench_files / name, depth, 6)
    assert read.total != by_hand(bench_files / name, depth, 5)
    assert read.by_role == {"cpu": read.total}


def test_a_plan_divides_the_bytes(bench_files):
    """The total stays the same, but for the copies that complete groups of 64. Hot neurons, and the
    caches of two of the three layers, are read on the GPU."""
    with planned(bench_files) as (plan, engine, sample):
        read = bytes_by_part(engine, plan, sample.steps)
        neuron = 3 * engine.model.tensors["blk.0.ffn_gate.weight"].row_bytes
    assert read.total == by_hand(bench_files / "predicted.gguf", 0, 6) + (24 + 8) * neuron
    assert read.of_part(HOT) == (64 + 0 + 96) * neuron
    assert read.of_part(COLD) == (64 + 96 + 0) * neuron and not read.of_part(NEURONS)
    assert read.by_part[HOT, "gpu"] == read.of_part(HOT)
    assert read.by_part[CACHE, "gpu"] == 2 * read.by_part[CACHE, "cpu"]
    assert sum(read.by_role.values()) == read.total


def test_steps_layer_by_layer_on_the_cpu_are_not_divided_by_a_plan(bench_files):
    """Their counters do not say which side of the plan a neuron is on."""
    with planned(bench_files) as (plan, engine, sample):
        read = bytes_by_part(engine, plan, replace(sample.steps, counts_LP2=None))
        neuron = 3 * engine.model.tensors["blk.0.ffn_gate.weight"].row_bytes
    assert read.by_role == {"cpu": read.total}
    assert read.total == by_hand(bench_files / "predicted.gguf", 0, 6) + (24 + 8) * neuron


def test_a_sparse_step_reads_fewer_neurons_and_the_predictors(bench_files):
    with Engine.load(bench_files / "predicted.gguf", mode="predicted", device="cpu") as engine:
        sample = sample_of(engine, BenchTest(kind="tg", length=6))
        read = bytes_by_part(engine, None, sample.steps)
        sizes = {n: e.num_bytes for n, e in engine.model.tensors.items()}
    predictors = sum(size for name, size in sizes.items() if "ffn_pred_" in name)
    neurons = sum(
        s for n, s in sizes.items() if ".ffn_" in n and "pred" not in n and "norm" not in n
    )
    assert read.of_part(PREDICTOR) == predictors
    traffic = sample.steps.traffic
    assert read.of_part(NEURONS) == pytest.approx((traffic.total - traffic.predictor) / 6)
    assert 0 < read.of_part(NEURONS) < neurons


def test_the_bytes_that_a_gpu_reads_follow_from_shapes(bench_files):
    """Bytes computed from shapes equal those that the CPU counts for the same plan, but for the
    copies that complete a group of 64 hot neurons there."""
    with planned(bench_files) as (plan, engine, sample):
        counted = bytes_by_part(engine, plan, sample.steps)
        engine.device = torch.device("cuda", 0)
        cold = Traffic(gate=round(6 * counted.of_part(COLD)))
        found = bytes_by_part(engine, plan, replace(sample.steps, counts_LP2=None, traffic=cold))
        want = {key: size for key, size in counted.by_part.items() if size}
        want[HOT, "gpu"] -= 24 * 3 * engine.model.tensors["blk.0.ffn_gate.weight"].row_bytes
        assert found.by_part == want
        engine.mode = "predicted"
        found = bytes_by_part(engine, plan, replace(sample.steps, counts_LP2=None, traffic=cold))
        engine.device = torch.device("cpu")
    assert found.unknown and found.total is None and set(found.by_role.values()) == {None}
    assert found.of_part(PREDICTOR) > 0


@pytest.mark.parametrize("depth, is_known", [(26, True), (27, False)])
def test_a_selection_of_keys_leaves_no_limit(bench_files, small_buffer, depth, is_known):
    """A text of at most sinks + window + top positions is read whole."""
    config = config_of(
        bench_files / "dense.gguf",
        device="cpu",
        depths=(depth,),
        prompt_lengths=(0,),
        gen_lengths=(6,),
        kv_offload="block=16,sinks=0,window=16,top=16",
    )
    report = bench(config)
    assert (report.results[0].limit is not None) == is_known == (report.limit_missing is None)
    assert is_known or any("there is no limit" in line for line in lines_of(report))


def test_tests_may_be_longer_than_the_training_with_scaled_embeddings(bench_files, small_buffer):
    path = bench_files / "dense.gguf"
    depth = ModelFile.load(path).spec.context_length
    options = {"device": "cpu", "depths": (depth,), "prompt_lengths": (0,), "gen_lengths": (4,)}
    with pytest.raises(HotsplitError, match="or --rope-scaling yarn"):
        bench(config_of(path, **options))
    with pytest.raises(HotsplitError, match="rope"):
        config_of(path, rope_scaling="straight", **options)
    report = bench(config_of(path, rope_scaling="yarn", **options))
    assert report.results[0].test.depth == depth and report.results[0].ours


# ---- parts --------------------------------------------------------------------------------------


def test_timing_parts_changes_no_bit_and_counts_the_traffic(bench_files):
    with Engine.load(bench_files / "predicted.gguf", mode="predicted", device="cpu") as engine:
        plain = [engine.logits([5, 9, 11]), engine.logits([3])]
        before = engine.traffic.total + engine.traffic.attention
        with timed_parts(engine._live.native) as counts:
            timed = [engine.logits([5, 9, 11]), engine.logits([3])]
        read = engine.traffic.total + engine.traffic.attention - before
        first = counts.clone()
        engine.logits([3])
    assert all(torch.equal(a, b) for a, b in zip(plain, timed, strict=True))
    assert first[..., 1].sum() == read > 0
    assert torch.equal(counts, first), "the clock was read after its block"
    assert (first[:-1, PARTS.index("head")] == 0).all() and (first[..., 0] >= 0).all()


def test_parts_cover_the_time_of_the_native_call(monkeypatch, tmp_path):
    """The parts' sum is at least 95 % (median), and never over 100 %, of the call's time by another
    clock."""
    shape = make_sizes(num_layers=2, width=512, num_neurons=2048, num_heads=8)
    make_model(sizes=shape, kind="f16").save(tmp_path / "m.gguf")
    taken, run = [], library.run_step

    def clocked(*arguments):
        began = time.perf_counter_ns()
        run(*arguments)
        taken.append(time.perf_counter_ns() - began)

    monkeypatch.setattr(library, "run_step", clocked)
    library.set_threads(1)
    shares = []
    with Engine.load(tmp_path / "m.gguf", mode="dense", device="cpu") as engine:
        for number in range(25):
            with timed_parts(engine._live.native) as counts:
                engine._step(7, number)
            shares.append(counts[..., 0].sum().item() / taken[-1])
    assert max(shares) <= 1.0
    assert statistics.median(shares) >= 0.95


@pytest.mark.parametrize("kind", ["pp", "tg"])
def test_parts_sum_to_the_run(bench_files, kind):
    plan = Split.load(bench_files / "plan.gguf")
    with Engine.load(
        bench_files / "predicted.gguf", bench_files / "plan.gguf", device="cpu"
    ) as engine:
        sample = sample_of(engine, BenchTest(kind=kind, length=6, depth=3))
    parts = part_ns(sample.steps.counts_LP2, plan, sample.ns)
    assert sum(parts.values()) == sample.ns and min(parts.values()) > 0
    assert {HOT, COLD, HEAD, PREDICTOR, CACHE} < set(parts)
    assert NEURONS not in parts


# ---- the report ---------------------------------------------------------------------------------

LLAMA_BENCH = (  # noqa: SIM905  # words
    "build_commit build_number cpu_info gpu_info backends model_filename model_type model_size"
    " model_n_params n_batch n_ubatch n_threads type_k type_v n_gpu_layers n_prompt n_gen n_depth"
    " test_time avg_ns stddev_ns avg_ts stddev_ts samples_ns samples_ts"
).split()


def test_the_report(bench_files, small_buffer):
    heard = []
    config = config_of(
        bench_files / "predicted.gguf", depths=(7, 0), mode="predicted", device="cpu"
    )
    report = bench(config, heard.append)
    assert sum(heard) == config.num_runs == 4 * 3
    names = [result.test.name for result in report.results]
    assert names == ["pp5", "tg4", "pp5 @ d7", "tg4 @ d7"]
    content = json.loads(json.dumps(to_json(report)))
    for test, result in zip(content["tests"], report.results, strict=True):
        assert [name for name in LLAMA_BENCH if name not in test] == []
        assert len(test["samples_ns"]) == 2 and test["n_depth"] == result.test.depth
        assert test["avg_ts"] == pytest.approx(statistics.mean(test["samples_ts"]))
        assert test["model_size"] == sum(
            int(t.n_bytes) for t in GGUFReader(bench_files / "predicted.gguf").tensors
        )
        assert sum(part["share"] or 0 for part in test["parts"]) == pytest.approx(1)
        is_text = test["n_gen"] > 0
        assert (test["share_of_limit"] is not None) == is_text
    texts = [test for test in content["tests"] if test["n_gen"]]
    for test in texts:
        rates = [1e9 / test["bytes_per_token"] * r for r in content["bandwidth_gb_per_s"]["cpu"]]
        assert min(rates) * 0.8 < test["limit_ts"] < max(rates) * 1.25
    assert any("random" in note for note in report.notes)
    assert len(content["bandwidth_gb_per_s"]["cpu"]) == 4
    assert "pp5 @ d7" in "\n".join(lines_of(report))


@pytest.mark.parametrize("load, is_noted", [(0.4, False), (7.5, True), (None, False)])
def test_a_busy_machine_is_noted(bench_files, small_buffer, monkeypatch, load, is_noted):
    monkeypatch.setattr("hotsplit.measure.bench.bench.load_now", lambda: load)
    report = bench(config_of(bench_files / "dense.gguf", device="cpu", repetitions=1))
    assert to_json(report)["load_before"] == load
    assert any("busy before the start: 7.5" in note for note in report.notes) == is_noted


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_the_limit_of_a_model_in_the_cache_is_the_caches(
    bench_files, small_buffer, monkeypatch, missing_bytes
):
    path = bench_files / "dense.gguf"
    size, asked = sum(int(t.n_bytes) for t in GGUFReader(path).tensors), []
    cache = "hotsplit.measure.bench.result.last_cache_bytes"
    monkeypatch.setattr(cache, lambda: size - missing_bytes)
    probe = "hotsplit.measure.bench.bench.cpu_bandwidth"
    monkeypatch.setattr(probe, lambda num_bytes: asked.append(num_bytes) or cpu_bandwidth())
    report = bench(config_of(path, device="cpu", repetitions=1))
    assert asked == [None if missing_bytes else size]
    assert any("last-level cache" in note for note in report.notes) == (not missing_bytes)


@pytest.mark.parametrize("num_bytes", [None, 1 << 22])
def test_a_probe_reads_so_many_bytes(small_buffer, monkeypatch, num_bytes):
    made = []
    monkeypatch.setattr(runner, "array_entry", lambda x, _: made.append(x) or array_entry(x, "f32"))
    assert cpu_bandwidth(num_bytes)() > 0
    assert made[0].nbytes == (num_bytes or 1 << 20)


def test_medians_and_spread():
    times = RunTimes(num_tokens=10, samples_ns=(2_000, 1_000, 4_000, 3_000))
    assert times.samples_ts == (5e6, 1e7, 2.5e6, 1e10 / 3_000)
    assert times.avg_ns == 2_500 and times.stddev_ns == round(statistics.stdev(times.samples_ns))
    assert times.samples_ns[times.middle] == 2_000
    assert RunTimes(num_tokens=1, samples_ns=(5,)).stddev_ts == 0.0


def test_the_text_gives_the_tokens(bench_files, tmp_path, small_buffer):
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 4)
    report = bench(
        config_of(bench_files / "predicted.gguf", text=text, mode="predicted", device="cpu")
    )
    assert not any("random" in note for note in report.notes)
    text.write_text("abc")
    with pytest.raises(HotsplitError, match="has 3 tokens, the longest test takes 5"):
        bench(config_of(bench_files / "predicted.gguf", text=text, device="cpu"))

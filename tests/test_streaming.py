"""A model streamed through memory layer by layer, against the same model loaded whole."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import random_model, save_tokenizer
from delta_models import FEW, delta_model
from forked import run_command
from models import byte_level_keys, make_model, make_sizes, shape_only
from reference import rel_error
from transformers import FalconConfig, LlamaConfig, OPTConfig

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.predictor_file import Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, array_entry, prefetch, release
from hotsplit.profile import memory
from hotsplit.profile.collect import profile
from hotsplit.profile.config import ProfileConfig
from hotsplit.profile.predictors.candidates import Choices
from hotsplit.profile.predictors.options import PredictorOptions
from hotsplit.profile.stream import streaming
from hotsplit.profile.stream.states import FileStates, MemoryStates
from hotsplit.profile.stream.streamed_quality import _Head
from hotsplit.profile.stream.streaming import LayerStream, StreamPlan, plan_stream
from hotsplit.runtime.ops.observers import NAMES
from hotsplit.runtime.step.native_layers import SHOWN

CPU = torch.device("cpu")
SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320,
         "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0,
         "pad_token_id": None}  # fmt: skip
GATED = SIZES | {"intermediate_size": 160, "num_key_value_heads": 2, "initializer_range": 0.1}
OPT = SIZES | {"ffn_dim": 192, "init_std": 0.1, "word_embed_proj_dim": 64}
FALCON = SIZES | {"ffn_hidden_size": 192, "initializer_range": 0.1, "activation": "relu"}
CASES = {
    "llama": LlamaConfig(**GATED, hidden_act="relu"),
    "llama-biases-tied": LlamaConfig(
        **GATED, hidden_act="relu", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "opt": OPTConfig(**OPT),
    "opt-norm-after": OPTConfig(**OPT, do_layer_norm_before=False),
    "falcon-7b": FalconConfig(**FALCON),
    "falcon-40b": FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-one-after-the-other": FalconConfig(**FALCON, parallel_attn=False, bias=True),
}
LACKING = {"ffn_predicted", "ffn_experts", "ffn_shared_hidden"}  # no case has them
WORDS = ["the ", "quick ", "brown ", "fox ", "def ", "add(a, ", "b):\n", "return ", "jumps "]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, and a model file of every case under its name: opt in q8_0, falcon-7b in f32, others
    in f16."""
    made = tmp_path_factory.mktemp("streaming")
    order = np.random.default_rng(0).integers(0, len(WORDS), 12_000)
    (made / "text.txt").write_text("".join(WORDS[i] for i in order))
    for case, config in CASES.items():
        save_tokenizer(random_model(made / "hf" / case, config), 320)
        outtype = {"opt": "q8_0", "falcon-7b": "f32"}.get(case, "f16")
        source = made / "hf" / case
        convert(ConvertConfig(source=source, output=made / case, outtype=outtype))
    return made


@pytest.fixture
def always_streams(monkeypatch):
    """Makes every model too large to load whole; hidden states stay in memory."""
    needs = memory.needs_of
    monkeypatch.setattr(
        streaming, "needs_of", lambda *a, **k: dataclasses.replace(needs(*a, **k), whole_bytes=1 << 60)
    )  # fmt: skip


def stream_of(path, tmp_path, *, spills=False) -> LayerStream:
    model = ModelFile.load(path)
    needs = memory.needs_of(model, window=256, context_length=256, choices=None)
    if spills:
        needs = dataclasses.replace(needs, state_row_bytes=1 << 50)
    plan = StreamPlan(device=CPU, needs=needs, max_memory_bytes=None, folder=tmp_path)
    return LayerStream(model, plan)


class Record:
    """Every tensor of a pass, by name and layer, in the order seen."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int | None], list[torch.Tensor]] = {}

    def observe(self, name, layer, tensor):
        self.seen.setdefault((name, layer), []).append(tensor.clone())


def is_same(first: Record, second: Record) -> bool:
    return first.seen.keys() == second.seen.keys() and all(
        len(a) == len(second.seen[key]) and all(map(torch.equal, a, second.seen[key]))
        for key, a in first.seen.items()
    )


def windows_of(seed=0, lengths=(200, 16, 129, 128, 256)):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(320, (n,), generator=generator) for n in lengths)


def test_recurrent_states_go_from_chunk_to_chunk(tmp_path):
    path, (keys, _) = tmp_path / "m.gguf", byte_level_keys()
    sizes = make_sizes(num_layers=4, vocab_size=320, context_length=256)
    delta_model(sizes, extra_keys=keys, experts=FEW).save(path)
    for wants in (None, lambda name, layer: name in SHOWN):
        want, got, said = Record(), Record(), []
        with Engine.load(path, mode="dense") as engine, engine.observe(want.observe, wants):
            for ids in windows_of():
                engine.hidden(ids)
        with stream_of(path, tmp_path) as stream, stream.observe(got.observe, wants):
            stream.say = said.append
            stream.run(windows_of(), lambda count: None)
        assert is_same(got, want) and ("ffn_experts", 3) in got.seen
        assert len(said) == 2


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spills", [False, True], ids=["memory", "file"])
def test_observers_see_the_same_bits_layer_by_layer(folder, tmp_path, case, spills):
    """Chunks of 128, one of them of a single token, in windows of many lengths."""
    want, got, other = Record(), Record(), Record()
    with (
        Engine.load(folder / case, mode="dense", device="cpu") as engine,
        engine.observe(want.observe),
    ):
        for ids in windows_of():
            engine.hidden(ids)
    with stream_of(folder / case, tmp_path, spills=spills) as stream:
        with stream.observe(got.observe):
            stream.run(windows_of(), lambda count: None)
        with stream.observe(other.observe):
            stream.run(windows_of(seed=1), lambda count: None)
    assert is_same(got, want)
    assert not is_same(other, want)
    in_layers = NAMES.keys() - {"embedding", "output_norm", "logits", *LACKING}
    assert {n for n, layer in got.seen if layer is not None} == in_layers
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", CASES)
def test_native_layers_show_the_same_bits_one_at_a_time(folder, tmp_path, case):
    """Chunks of 128, one of them of a single token."""
    want, got, in_torch = Record(), Record(), Record()
    with Engine.load(folder / case, mode="dense", device="cpu") as engine:
        for record, names in ((want, SHOWN), (in_torch, SHOWN | {"attn_out"})):
            with engine.observe(record.observe, lambda name, layer, names=names: name in names):
                for ids in windows_of():
                    engine.hidden(ids)
    with (
        stream_of(folder / case, tmp_path) as stream,
        stream.observe(got.observe, lambda name, layer: name in SHOWN),
    ):
        stream.run(windows_of(), lambda count: None)
    assert is_same(got, want)
    assert {name for name, layer in got.seen} == SHOWN - LACKING
    for key, tensors in got.seen.items():
        for mine, other in zip(tensors, in_torch.seen[key], strict=True):
            assert rel_error(mine, other) < 1e-3, key


@pytest.mark.parametrize("case", ["llama", "opt", "falcon-7b"])
def test_a_streamed_profile_equals_the_ordinary_one(folder, tmp_path, case, monkeypatch, request):
    config = ProfileConfig(model=folder / case, corpora=(folder / "text.txt",),
                           output=tmp_path / "whole", max_tokens=2000, device="cpu")  # fmt: skip
    profile(config)
    lines, counted = [], []
    request.getfixturevalue("always_streams")
    profile(dataclasses.replace(config, output=tmp_path / "streamed"), counted.append, lines.append)
    whole, streamed = Profile.load(tmp_path / "whole"), Profile.load(tmp_path / "streamed")
    assert (whole.active_count_LF == streamed.active_count_LF).all()
    assert (whole.gate_histogram_LB == streamed.gate_histogram_LB).all()
    assert whole.num_tokens == streamed.num_tokens == round(sum(counted))
    assert whole.active_count_LF.any()
    assert "streaming 3 layers" in lines[0]
    assert "GB to read" in lines[1]


def assert_same_quality(a, b):
    """Compares a model in memory with a streamed one; something is lost in both."""
    assert a.kl_mean > 1e-7
    assert a.mode == b.mode and a.num_tokens == b.num_tokens
    for field in ("perplexity", "dense_perplexity", "kl_mean", "kl_p99", "top1_agreement"):
        assert getattr(a, field) == pytest.approx(getattr(b, field), rel=1e-6), field
    assert a.named_share_L == b.named_share_L and a.hidden_share_L == b.hidden_share_L


@pytest.mark.parametrize("case, offset", [("llama", 0), ("llama", 1), ("falcon-40b", 1)])
def test_streamed_predictors_equal_the_ordinary_ones(folder, tmp_path, case, offset, request):
    config = ProfileConfig(
        model=folder / case, corpora=(folder / "text.txt",), output=tmp_path / "p",
        max_tokens=4000, train_predictors=tmp_path / "whole", predictors=PredictorOptions(rank=32),
        input_layer_offset=offset, device="cpu",
    )  # fmt: skip
    whole = profile(config)
    request.getfixturevalue("always_streams")
    streamed = profile(
        dataclasses.replace(config, output=tmp_path / "q", train_predictors=tmp_path / "streamed")
    )
    assert whole.quality_L == streamed.quality_L
    assert_same_quality(whole.quality, streamed.quality)
    a, b = (Predictors.load(tmp_path / name / "predictors.safetensors")
            for name in ("whole", "streamed"))  # fmt: skip
    assert a.info == b.info
    for layer, (mine, other) in enumerate(zip(a.layers, b.layers, strict=True)):
        for name, array in mine.arrays(layer).items():
            assert (array == other.arrays(layer)[name]).all(), name


def test_the_streamed_head_caps_its_logits():
    model = make_model()
    model = dataclasses.replace(
        model, bare_spec=dataclasses.replace(model.bare_spec, logit_cap=0.3)
    )
    x_TD = torch.randn(3, model.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    with Engine.of(model, device="cpu") as engine, torch.inference_mode():
        want_TV = engine._live.logits(x_TD)
    assert torch.equal(_Head(model).logits(x_TD), want_TV) and want_TV.abs().max() > 0.2


def test_a_window_left_behind_is_noticed(folder, tmp_path):
    with stream_of(folder / "llama", tmp_path) as stream:
        steps = stream.steps(windows_of())
        step = next(steps)
        step.advance(0, 4)
        with pytest.raises(AssertionError):
            step.advance(3, 5)
        with pytest.raises(AssertionError):
            next(steps)


# ---- what fits --------------------------------------------------------------------------------


def test_a_model_streams_only_if_it_does_not_fit(folder, tmp_path, monkeypatch):
    model = ModelFile.load(folder / "llama")
    needs = memory.needs_of(model, window=256, context_length=256, choices=None)

    def plan(free, max_memory=None):
        monkeypatch.setattr(
            memory, "free_memory_bytes", lambda: round(free / memory.FREE_SHARE) + 1
        )
        return plan_stream(model, device=CPU, max_memory_bytes=max_memory, choices=None,
                           folder=tmp_path)  # fmt: skip

    needs = dataclasses.replace(needs, whole_bytes=needs.layer_bytes + 1000)
    monkeypatch.setattr(streaming, "needs_of", lambda *a, **k: needs)
    monkeypatch.setattr(memory, "resident_bytes", lambda: 5 << 20)
    assert plan(needs.whole_bytes) is None
    assert plan(needs.whole_bytes - 100) is not None
    assert plan(needs.whole_bytes, (5 << 20) + needs.whole_bytes) is None
    assert plan(needs.whole_bytes, (5 << 20) + needs.whole_bytes - 1) is not None
    with pytest.raises(HotsplitError, match="one layer at a time takes"):
        plan(needs.layer_bytes - 100)
    with pytest.raises(HotsplitError, match="the program alone takes 5.00 MiB"):
        plan(needs.whole_bytes, 4 << 20)


def test_training_takes_memory_for_each_layer_that_is_loaded():
    model = make_model(sizes=make_sizes(num_layers=8, width=512, num_neurons=2048))
    bare, trained = (
        memory.needs_of(model, window=128, context_length=128, choices=choices)
        for choices in (None, Choices(ranks=(64,)))
    )
    lasting, passing = memory.trainer_bytes(512, 2048, Choices(ranks=(64,)))
    assert trained.whole_bytes - bare.whole_bytes == 8 * lasting + passing
    assert trained.layer_bytes - bare.layer_bytes == lasting + passing
    weights = sum(e.num_bytes for e in model.tensors.values())
    assert bare.whole_bytes > weights > bare.layer_bytes - memory.SLACK_BYTES


def test_states_in_memory_and_in_a_file_hold_what_was_written(tmp_path):
    x_ND = torch.randn(50, 7)
    for states in (MemoryStates(50, 7, CPU), FileStates(50, 7, tmp_path)):
        for start in (0, 20, 40):
            states.write(start, x_ND[start : start + 20])
        assert torch.equal(states.read(13, 45), x_ND[13:45])
        piece = states.read(13, 45)
        piece.zero_()  # a copy
        assert torch.equal(states.read(0, 50), x_ND)
        states.close()
    assert not list(tmp_path.iterdir())


def test_a_disk_without_space_is_refused_in_one_line(tmp_path):
    with pytest.raises(HotsplitError, match="no space for") as caught:
        FileStates(1 << 40, 1 << 16, tmp_path)
    assert "\n" not in str(caught.value)


def test_released_pages_are_read_again(folder):
    """Pages of a mapped file are read again; values that are only in memory are not released."""
    model = ModelFile.load(folder / "llama")
    entry = model.tensors["blk.1.ffn_up.weight"]
    before = entry.read().copy()
    prefetch(entry)
    release(entry)
    assert (entry.read() == before).all()
    own = array_entry(np.ones((300, 300)), "f32")
    release(own)
    assert own.read().all()


def test_the_command_refuses_a_memory_limit_below_what_the_program_takes(folder, tmp_path):
    def run(size):
        return run_command("profile", folder / "llama", "--corpus", folder / "text.txt", "-o",
                           tmp_path / "p", "--max-memory", size, "--device", "cpu",
                           "--tokens", 600)  # fmt: skip

    refused = run("16MiB")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "the program alone takes" in refused.stderr
    assert not list(tmp_path.iterdir())
    assert run("100GiB").returncode == 0


# ---- a model of four times the memory ----------------------------------------------------------

CAP_BYTES = 100 << 20  # besides what the program takes before the profile starts
CHILD = """
import sys
import time
from pathlib import Path
import hotsplit.profile.predictors.train
from hotsplit.profile.collect import profile
from hotsplit.profile.config import ProfileConfig
from hotsplit.profile.memory import resident_bytes

folder, cap, options = Path(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3])
start = resident_bytes()
print(start, flush=True)
sys.stdin.readline()
profile(
    ProfileConfig(model=folder / "big.gguf", corpora=(folder / "text.txt",), output=folder / "p",
                  force=True, device="cpu", max_memory_bytes=start + cap if cap else None, **options),
    say=lambda line: print(line, file=sys.stderr),
)
"""


@pytest.fixture(scope="module")
def big_folder(tmp_path_factory):
    """A model file of 417 MiB in f16: 16 layers of 26 MiB. The rows of a matrix are
    overlapping slices of the same random values."""
    made = tmp_path_factory.mktemp("big")
    shape = make_sizes(num_layers=16, width=1024, num_neurons=3072, num_heads=8, num_kv_heads=8,
                       vocab_size=320, context_length=512)  # fmt: skip
    model = shape_only(shape)
    generator = np.random.default_rng(0)

    def filled(entry: TensorEntry) -> TensorEntry:
        if len(entry.shape) == 1:
            return array_entry(np.ones(entry.shape), "f32")
        rows = generator.standard_normal(entry.shape[-1] + 997) / entry.shape[-1] ** 0.5
        rows = rows.astype(np.float16)

        def read(start: int, stop: int) -> np.ndarray:
            at = (np.arange(start, stop) * 31 % 997)[:, None] + np.arange(entry.shape[-1])
            return rows[at]

        return TensorEntry(shape=entry.shape, kind="f16", read_rows=read)

    save_tokenizer(made, 320)
    dataclasses.replace(
        model,
        tensors={name: filled(entry) for name, entry in model.tensors.items()},
        extra_keys={"tokenizer.huggingface.json": (made / "tokenizer.json").read_text(),
                    "tokenizer.ggml.bos_token_id": np.uint32(0)},
    ).save(made / "big.gguf")  # fmt: skip
    order = np.random.default_rng(0).integers(0, len(WORDS), 3000)
    (made / "text.txt").write_text("".join(WORDS[i] for i in order))
    assert (made / "big.gguf").stat().st_size > 4 * CAP_BYTES
    return made


def peak_over_start(folder, cap_bytes, **options) -> tuple[int, str]:
    """(peak resident bytes, anonymous and mapped, minus those before the profile; its stderr)."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(cap_bytes), repr(options)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin and child.stdout and child.stderr
    start, peak = int(child.stdout.readline()), 0
    child.stdin.write("go\n")
    child.stdin.flush()
    while child.poll() is None:
        text = Path(f"/proc/{child.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines())
        if "RssAnon" in fields:  # gone when it has ended
            peak = max(peak, sum(1024 * int(fields[kind].split()[0])
                                 for kind in ("RssAnon", "RssFile", "RssShmem")))  # fmt: skip
        time.sleep(0.002)
    said = child.stderr.read()
    assert child.returncode == 0, said
    return peak - start, said


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="not Linux")


@needs_proc
def test_a_model_of_four_times_the_memory_stays_below_its_cap(big_folder):
    began = time.perf_counter()
    peak, said = peak_over_start(big_folder, CAP_BYTES, max_tokens=600)
    assert "streaming 16 layers" in said
    assert 20 << 20 < peak < CAP_BYTES, (peak >> 20, said)
    assert time.perf_counter() - began < 60
    print(f"peak {peak >> 20} MiB over the start\n{said}")


@needs_proc
def test_the_measure_of_the_peak_sees_a_whole_model(big_folder):
    peak, said = peak_over_start(big_folder, 0, max_tokens=20)
    assert peak > 3 * CAP_BYTES
    assert said == ""

"""limits.safetensors, its tensors in a model file, and refusals of both."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from checkpoints import random_model
from models import make_model, make_sizes
from reference import rel_error
from transformers import FalconConfig, LlamaConfig, Qwen2Config

from hotsplit import Engine
from hotsplit.artifacts.limits_file import FILE_NAME, LayerLimits, Limits
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry, write_gguf
from hotsplit.files.safetensors_file import save_arrays
from hotsplit.inspection.inspect_file import inspect_file
from hotsplit.measure.evaluate.verify_conversion import verify

D, F = 64, 96
SHAPE = make_sizes(width=D, num_neurons=F)
IDS = [5, 17, 30, 4, 9, 5, 5, 21, 33, 0, 25, 7]
CHECKPOINT = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
    "initializer_range": 0.1,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**CHECKPOINT, intermediate_size=96, num_key_value_heads=2,
                         hidden_act="silu", attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**CHECKPOINT, intermediate_size=96, num_key_value_heads=2),
    "falcon": FalconConfig(**CHECKPOINT, ffn_hidden_size=96, new_decoder_architecture=True,
                           num_kv_heads=2, alibi=False, bias=True),
}  # fmt: skip


def limits_of(*, scale=0.3, layers=2, seed=0) -> Limits:
    random = np.random.default_rng(seed)
    values_LF = (scale * np.abs(random.standard_normal((layers, F)))).astype(np.float32)
    return Limits(model_id=None, layers=tuple(LayerLimits(gate_F=limit_F) for limit_F in values_LF))


def test_a_file_round_trips(tmp_path):
    whole = limits_of()
    some = dataclasses.replace(whole, model_id="m", layers=(LayerLimits(), whole.layers[0]))
    for limits in (whole, some, Limits(model_id=None, layers=(LayerLimits(),))):
        limits.save(tmp_path / "l.safetensors")
        again = Limits.load(tmp_path / "l.safetensors")
        assert again.model_id == limits.model_id and len(again.layers) == len(limits.layers)
        assert again.arrays().keys() == limits.arrays().keys()
        for name, limit in limits.arrays().items():
            assert np.array_equal(again.arrays()[name], limit)
    assert whole and some and not Limits(model_id=None, layers=(LayerLimits(),))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"blk.0.ffn_gate.limit": -np.ones(3, np.float32)}, "not all finite and at least 0"),
        ({"blk.0.ffn_gate.limit": np.full(3, np.nan, np.float32)}, "not all finite and at least 0"),
        ({"blk.0.ffn_gate.limit": np.full(3, np.inf, np.float32)}, "not all finite and at least 0"),
        ({"blk.0.ffn_gate.limit": np.zeros((3, 1), np.float32)}, "wanted a vector of float32"),
        ({"blk.0.ffn_gate.limit": np.zeros(3)}, "float64.*wanted a vector of float32"),
        ({"blk.0.ffn_gate.limit": np.zeros(0, np.float32)}, "wanted a vector of float32"),
        ({"blk.2.ffn_gate.limit": np.zeros(3, np.float32)}, "unknown array 'blk.2.ffn_gate.limit'"),
        ({"blk.0.ffn_up.limit": np.zeros(3, np.float32)}, "unknown array 'blk.0.ffn_up.limit'"),
        ({"blk.0.ffn_down.limit": np.zeros(3, np.float32)}, "unknown array 'blk.0.ffn_down.limit'"),
        ({"blk.0.attn_qkv.limit": np.zeros(3, np.float32)}, "unknown array 'blk.0.attn_qkv.limit'"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, change, message):
    path = tmp_path / "l.safetensors"
    save_arrays(path, "hotsplit.limits", 1, {"model_id": None, "num_layers": 2}, change)
    with pytest.raises(HotsplitError, match=message) as refusal:
        Limits.load(path)
    assert "\n" not in str(refusal.value) and str(path) in str(refusal.value)


def test_a_file_shorter_than_a_headers_length_is_refused(tmp_path):
    path = tmp_path / "short"
    for content in (b"", b"1234567"):
        path.write_bytes(content)
        with pytest.raises(HotsplitError, match=rf"\(it has {len(content)} bytes\)"):
            Limits.load(path)


def test_wrong_metadata_are_refused(tmp_path):
    path, good = tmp_path / "l.safetensors", {"model_id": None, "num_layers": 2}
    for metadata, version, message in (
        (good, 2, "version '2', this program reads 1"),
        (good | {"num_layers": 0}, 1, "num_layers is 0"),
        (good | {"num_layers": 1 << 40}, 1, "num_layers is"),
        (good | {"more": 1}, 1, "'more' is unknown"),
        (good | {"model_id": 3}, 1, "model_id is 3"),
    ):
        arrays = {"blk.0.ffn_gate.limit": np.zeros(3, np.float32)}
        save_arrays(path, "hotsplit.limits", version, metadata, arrays)
        with pytest.raises(HotsplitError, match=message):
            Limits.load(path)


def model_of(**options) -> ModelFile:
    return make_model(sizes=SHAPE, **({"activation": "silu"} | options))


def with_tensor(model: ModelFile, name: str, values: np.ndarray, kind="f32") -> ModelFile:
    return dataclasses.replace(model, tensors=model.tensors | {name: array_entry(values, kind)})


@pytest.mark.parametrize(
    "name, values, message",
    [
        ("blk.0.ffn_gate.limit", np.full(F, -1.0), "not all finite and at least 0"),
        ("blk.1.ffn_gate.limit", np.full(F, np.nan), "not all finite and at least 0"),
        ("blk.1.ffn_gate.limit", np.zeros(F + 1), r"is f32 \[97\],"),
        ("blk.1.ffn_gate.limit", np.zeros((F, 1)), "wanted a vector of f32"),
        ("blk.1.ffn_up.limit", np.zeros(F), "unknown tensor 'blk.1.ffn_up.limit'"),
        ("blk.2.ffn_gate.limit", np.zeros(F), "unknown tensor 'blk.2.ffn_gate.limit'"),
        ("blk.1.ffn_down.limit", np.zeros(F), "unknown tensor 'blk.1.ffn_down.limit'"),
        ("blk.1.attn_qkv.limit", np.zeros(D), "unknown tensor 'blk.1.attn_qkv.limit'"),
    ],
)  # fmt: skip
def test_a_model_file_with_wrong_limits_is_refused(tmp_path, name, values, message):
    with pytest.raises(HotsplitError, match=message):
        with_tensor(model_of(), name, values).save(tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_limits_that_a_model_cannot_have_are_refused(tmp_path):
    zero = np.zeros(F)
    model = dataclasses.replace(model_of(), threshold_L=(0.0, 0.1))
    with_tensor(model, "blk.0.ffn_gate.limit", zero).validate()
    for wrong, message in (
        (with_tensor(model, "blk.1.ffn_gate.limit", zero), "a threshold .0.1. and limits"),
        (with_tensor(model_of(activation="relu"), "blk.0.ffn_gate.limit", zero), "this relu model"),
        (with_tensor(model_of(), "blk.0.ffn_gate.limit", zero, "f16"), "wanted a vector of f32"),
    ):
        with pytest.raises(HotsplitError, match=message):
            wrong.validate()


@pytest.mark.parametrize("name", ["attn_q", "attn_output", "ffn_gate", "ffn_up"])
def test_a_transposed_matrix_other_than_the_down_projection_is_refused(tmp_path, name):
    """It is refused as one line that names it, the file and the next step."""
    tensors = dict(model_of().tensors)
    entry = tensors.pop(f"blk.0.{name}.weight")
    tensors[f"blk.0.{name}_t.weight"] = array_entry(entry.read().T, "f32")
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", {**model_of()._own_keys(), **model_of().extra_keys}, tensors)
    with pytest.raises(HotsplitError, match=rf"unknown tensor 'blk.0.{name}_t.weight'") as refusal:
        ModelFile.load(path)
    assert "convert the checkpoint again" in str(refusal.value) and str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_model_returns_its_limits():
    limits = limits_of()
    model = model_of().with_limits(limits, "here")
    assert model.has_limits and not model_of().has_limits
    for name, limit in limits.arrays().items():
        assert np.array_equal(model.limits.arrays()[name], limit)
    assert not model.with_limits(Limits(model_id=None, layers=(LayerLimits(),) * 2), "x").has_limits


def saved(model: ModelFile, tmp_path, name="base.gguf"):
    model = dataclasses.replace(model, path=tmp_path / name)
    model.save(model.path)
    return model.path


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_convert_writes_limits(tmp_path, kind):
    base, limits = saved(model_of(), tmp_path), limits_of()
    limits.save(tmp_path / "l.safetensors")
    config = ConvertConfig(
        source=base, output=tmp_path / "m.gguf", outtype=kind, limits=tmp_path / "l.safetensors"
    )
    report = convert(config, verify=lambda written: [verify(written).line])
    assert report.verified and "verified: logits equal" in report.verified
    model, source = ModelFile.load(tmp_path / "m.gguf"), ModelFile.load(base)
    assert model.tensors.keys() == source.tensors.keys() | limits.arrays().keys()
    for name, limit in limits.arrays().items():
        assert np.array_equal(model.limits.arrays()[name], limit)
    with (
        Engine.load(tmp_path / "m.gguf", mode="exact") as engine,
        Engine.load(base, limits=config.limits) as own,
    ):
        assert engine.mode == own.mode == "exact"
        if kind == "f32":
            assert rel_error(engine.logits(IDS), own.logits(IDS)) < 1e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_a_checkpoint_with_its_own_limits_is_converted(tmp_path, family):
    """There are families without gates, with one matrix for query, key and value, with permuted
    rows, and with biases."""
    folder = random_model(tmp_path / "checkpoint", CONFIGS[family])
    base = convert(ConvertConfig(source=folder, output=tmp_path / "base.gguf", outtype="f32"))
    limits = limits_of(scale=0.5)
    limits.save(folder / FILE_NAME)
    convert(
        ConvertConfig(source=folder, output=tmp_path / "m.gguf", outtype="f32"),
        verify=lambda written: [verify(written).line],
    )
    found = ModelFile.load(tmp_path / "m.gguf")
    assert found.model_id == base.model_id and found.has_limits
    with (
        Engine.load(tmp_path / "m.gguf", mode="exact") as engine,
        Engine.load(base.output, mode="exact") as rows,
    ):
        dense = rows.logits(IDS)
        rows.set_limits(limits)
        want = rows.logits(IDS)
        assert rel_error(engine.logits(IDS), want) < 1e-5 < 1e-2 < rel_error(dense, want)
    wanted = "made to run with these limits" if family != "falcon" else "graph has no"
    with pytest.raises(HotsplitError, match=wanted):
        convert(ConvertConfig(source=folder, output=tmp_path / "s.gguf", layout="stock"))


def test_what_convert_cannot_write_is_refused(tmp_path):
    base = saved(model_of(), tmp_path)
    relu = saved(model_of(activation="relu"), tmp_path, "relu.gguf")
    good, few, other = (tmp_path / f"{n}.safetensors" for n in ("good", "few", "other"))
    limits_of().save(good)
    limits_of(layers=1).save(few)
    dataclasses.replace(limits_of(), model_id="another model").save(other)
    output = tmp_path / "m.gguf"
    for source, path, message in (
        (base, few, "limits of 1 layers, the model has 2"),
        (base, other, "limits of model another mode"),
        (relu, good, "this relu model cannot have them"),
        (base, tmp_path / "none.safetensors", "none.safetensors"),
        (base, base, "wanted a hotsplit.limits file"),
    ):
        with pytest.raises(HotsplitError, match=message) as refusal:
            convert(ConvertConfig(source=source, output=output, limits=path))
        assert "\n" not in str(refusal.value) and not output.exists()
    with pytest.raises(HotsplitError, match="stock layout cannot hold limits"):
        ConvertConfig(source=base, output=output, limits=good, layout="stock")
    convert(ConvertConfig(source=base, output=output, limits=good))
    with pytest.raises(HotsplitError, match="the stock layout cannot have them"):
        convert(ConvertConfig(source=output, output=tmp_path / "s.gguf", layout="stock"))


def test_a_file_with_limits_can_be_inspected(tmp_path):
    limits_of().save(tmp_path / "l.safetensors")
    convert(
        ConvertConfig(source=saved(model_of(), tmp_path), output=tmp_path / "m.gguf",
                      limits=tmp_path / "l.safetensors")
    )  # fmt: skip
    summary = inspect_file(tmp_path / "m.gguf")
    assert summary.refusal is None
    shown = {fact.name: fact.part for fact in summary.tensors}
    assert shown["blk.0.ffn_gate.limit"] == shown["blk.0.ffn_gate.weight"] == "ffn"


def test_the_key_of_a_saved_prompt_covers_its_limits(tmp_path: Path) -> None:
    from hotsplit.runtime.generate.prompt_cache import weights_digest

    model = make_model(path=tmp_path / "m.gguf", activation="silu")
    size = model.spec.most_neurons
    digests = {weights_digest(model)}
    for last in (0.1, 0.2):
        limit_F = np.full(size, 0.1, np.float32)
        limit_F[-1] = last
        layers = (LayerLimits(gate_F=limit_F),) * model.spec.num_layers
        limits = Limits(model_id=model.model_id, layers=layers)
        digests.add(weights_digest(model.with_limits(limits, "limits")))
    assert len(digests) == 3


def test_a_model_file_keeps_trained_limits_and_their_cost(tmp_path: Path) -> None:
    from hotsplit.costs.default_mode import choose_mode
    from hotsplit.model.mode_quality import ModeQuality

    model = make_model(path=tmp_path / "m.gguf", activation="silu")
    quality = ModeQuality(
        perplexity_increase=0.5, perplexity_half_width=0.1, kl_mean=0.4, top1_agreement=0.7,
        num_tokens=100, bytes_per_token=10, dense_bytes_per_token=20, corpus_sha256="0" * 64,
    )  # fmt: skip
    limit_F = np.full(model.spec.most_neurons, 0.1, np.float32)
    layers = (LayerLimits(gate_F=limit_F),) * model.spec.num_layers
    for is_trained, mode in ((False, "dense"), (True, "exact")):
        path = tmp_path / f"{is_trained}.safetensors"
        limits = Limits(
            model_id=model.model_id, layers=layers, is_trained=is_trained,
            quality={"exact": quality},
        )  # fmt: skip
        limits.save(path)
        sparse = model.with_limits(Limits.load(path), "limits")
        sparse.save(tmp_path / f"{is_trained}.gguf")
        read = ModelFile.load(tmp_path / f"{is_trained}.gguf")
        assert read.is_trained_sparse == is_trained
        assert read.quality["exact"] == quality
        assert choose_mode(read).mode == mode

"""Third-party or damaged GGUF files: those that llama.cpp would run differently are
refused. Oracle: how llama.cpp reads the keys (llama-model.cpp)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from checkpoints import random_llama
from models import make_model

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, array_entry, read_gguf, write_gguf
from hotsplit.model.rope import NO_SCALING
from hotsplit.model.unsupported import difference

OWN = ("general.architecture", "hotsplit.model_id")


@pytest.fixture(scope="module")
def silu(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("hf") / "hf", hidden_act="silu")


@pytest.fixture(scope="module")
def stock(silu, tmp_path_factory):
    """A function that returns the file of a type in the stock layout."""
    folder = tmp_path_factory.mktemp("stock")

    def get(kind: str = "f32") -> Path:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            convert(ConvertConfig(source=silu, output=path, outtype=kind, layout="stock"))
        return path

    return get


def changed(source: Path, path: Path, keys: dict, tensors: dict[str, TensorEntry]) -> Path:
    """The file with other keys (None: without them) and tensors."""
    old_keys, old_tensors = read_gguf(source, "model file")
    new = {k: v for k, v in (old_keys | keys).items() if v is not None and k not in OWN}
    write_gguf(path, "llama", new, old_tensors | tensors)
    return path


KEYS = {
    "attention.causal is not true": {"llama.attention.causal": False},
    "head_count is 4, attention.head_count_kv 3 and": {
        "llama.attention.head_count_kv": np.uint32(3)
    },
    "value_length 8 and rope.dimension_count 16: rotary": {
        "llama.attention.value_length": np.uint32(8)
    },
    "rope.freq_base' is 0.0, wanted more": {"llama.rope.freq_base": np.float32(0)},
    "rope.freq_base' is -1.0, wanted more": {"llama.rope.freq_base": np.float32(-1)},
    "rms_epsilon' is -1.0, wanted more": {"llama.attention.layer_norm_rms_epsilon": np.float32(-1)},
    "factor' is 0.0, wanted more": {"llama.rope.scaling.factor": np.float32(0)},
    "factor' is missing, wanted a number": {"llama.rope.scaling.type": "linear"},
    "rope.scaling.type is 'dynamic', wanted none, linear, yarn, longrope": {
        "llama.rope.scaling.type": "dynamic"
    },
    "no tensor 'rope_factors_long.weight' for": {"llama.rope.scaling.type": "longrope"},
    "rms_epsilon' is 1e.308, beyond the range of f32": {
        "llama.attention.layer_norm_rms_epsilon": np.float64(1e308)
    },
    "freq_base' is 1e-60, beyond the range of f32": {"llama.rope.freq_base": np.float64(1e-60)},
    "factor' is 1e.39, beyond the range of f32": {"llama.rope.scaling.factor": np.float64(1e39)},
    "threshold' has 1e.39, beyond the range of f32": {
        "hotsplit.ffn.threshold": [np.float64(v) for v in (0.0, 1e39, 0.0)]
    },
    "threshold' is not all finite": {"hotsplit.ffn.threshold": [0.0, float("inf"), 0.0]},
    "threshold' is not all finite and at least 0": {"hotsplit.ffn.threshold": [0.0, -1.0, 0.0]},
}


@pytest.mark.parametrize("words", KEYS)
def test_keys_that_would_be_computed_wrongly_are_refused(stock, tmp_path, words):
    path = changed(stock(), tmp_path / "in.gguf", KEYS[words], {})
    with pytest.raises(HotsplitError, match=words):
        convert(ConvertConfig(source=path, output=tmp_path / "out.gguf"))
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


@pytest.mark.parametrize(
    "kind, factor", [(None, 4.0), ("linear", 4.0), ("none", 1.0)]
)  # without a type llama.cpp takes linear, and for none it ignores the factor
def test_the_linear_factor_is_that_of_llama_cpp(stock, tmp_path, kind, factor):
    keys = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": np.float32(4)}
    path = changed(stock(), tmp_path / "in.gguf", keys | {"llama.attention.causal": True}, {})
    assert ModelFile.load(path).spec.rope_scaling.factor == factor
    convert(ConvertConfig(source=path, output=tmp_path / "out.gguf"))
    assert ModelFile.load(tmp_path / "out.gguf").spec.rope_scaling.factor == factor
    assert ModelFile.load(stock()).spec.rope_scaling == NO_SCALING


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_frequency_factors_are_finite_and_above_zero(stock, tmp_path, value):
    factors = np.ones(8, np.float32)
    good = {"rope_freqs.weight": array_entry(factors, "f32")}
    ModelFile.load(changed(stock(), tmp_path / "good.gguf", {}, good))
    factors[3] = value
    path = changed(stock(), tmp_path / "in.gguf", {}, good)
    with pytest.raises(HotsplitError, match="rope_freqs.weight.* (not all finite|NaN or inf)"):
        convert(ConvertConfig(source=path, output=tmp_path / "out.gguf"))


@pytest.mark.parametrize("layout", ["sparse", "stock"])
def test_one_matrix_twice_is_refused(stock, tmp_path, layout):
    down = ModelFile.load(stock()).tensors["blk.1.ffn_down.weight"]
    twice = {"blk.1.ffn_down_t.weight": array_entry(down.read().T, "f32")}
    path = changed(stock(), tmp_path / "in.gguf", {}, twice)
    options = {"layout": layout, "activation": "silu"}
    with pytest.raises(HotsplitError, match="one matrix twice"):
        convert(ConvertConfig(source=path, output=tmp_path / "out.gguf", **options))


def damaged(entry: TensorEntry, value: float) -> TensorEntry:
    """The entry with this value in its third row, as an element or as the scale of a block."""
    data = np.array(entry.read())
    if entry.kind in ("f32", "f16"):
        data[2, 5] = value
    elif entry.kind == "bf16":
        data[2].view(np.uint16)[5] = np.float32(value).view(np.uint32) >> 16
    else:
        data[2, :2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return dataclasses.replace(entry, read_rows=lambda a, b: data[a:b])


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_tensors_that_are_copied_unchanged_must_be_finite(stock, tmp_path, kind, value):
    name = "blk.1.ffn_up.weight"
    entry = ModelFile.load(stock(kind)).tensors[name]
    path = changed(stock(kind), tmp_path / "in.gguf", {}, {name: damaged(entry, value)})
    with pytest.raises(HotsplitError, match=f"{name}' has NaN or infinite values"):
        convert(ConvertConfig(source=path, output=tmp_path / "out.gguf"))
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]
    good = changed(stock(kind), tmp_path / "good.gguf", {}, {name: damaged(entry, 0.5)})
    convert(ConvertConfig(source=good, output=tmp_path / "out.gguf"))


@pytest.mark.parametrize(
    "layout, step", [("stock", "download the file"), ("sparse", "convert the")]
)
def test_a_missing_tensor_has_the_advice_that_fits_the_file(layout, step):
    whole = dataclasses.replace(make_model(), layout=layout)
    down = "ffn_down" if layout == "stock" else "ffn_down_t"
    named = {name.replace("ffn_down_t", down): entry for name, entry in whole.tensors.items()}
    left = {name: entry for name, entry in named.items() if "1.attn_q" not in name}
    with pytest.raises(HotsplitError, match=f"no tensor 'blk.1.attn_q.* layers; {step}"):
        dataclasses.replace(whole, tensors=left).validate()


def of_layers(*names):
    return ["token_embd.weight", *(f"blk.{n}.{name}.weight" for n in (0, 1) for name in names)]


LLAMAS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate")


@pytest.mark.parametrize(
    "names, line",
    [
        (LLAMAS, "; its tensors have the names of llama's, its graph may be another"),
        ((*LLAMAS, "ssm_a"), "; beside tensors that llama has, it has ssm_a"),
        (
            (*LLAMAS, "a", "b", "c", "d"),
            "; beside tensors that llama has, it has a, b, c and 1 more",
        ),
        ((*LLAMAS, "attn_q_norm"), "; its tensors have the names of qwen3's, its graph may be"),
    ],
)
def test_an_unknown_architecture_differs_from_the_nearest_one(names, line):
    assert difference(of_layers(*names), ("llama", "qwen3")).startswith(line)
    assert not difference([], ("llama", "qwen3"))


def test_a_file_of_an_unknown_architecture_says_what_differs(tmp_path):
    path = tmp_path / "m.gguf"
    entry = array_entry(np.zeros((2, 32), np.float32), "f32")
    write_gguf(path, "xverse", {}, dict.fromkeys(of_layers("attn_q", "odd"), entry))
    with pytest.raises(HotsplitError, match="'xverse'; beside .* it has odd; llama.cpp runs it; k"):
        ModelFile.load(path)

"""Each artifact round-trips and is refused if it is wrong; splits and profiles have the bytes that
docs/formats.md specifies."""

import dataclasses
import hashlib
import json
import re
import struct

import numpy as np
import pytest
from models import make_machine, make_model, make_profile, make_sizes
from test_runtime import make_split

from hotsplit.artifacts.model_file import PredictorInfo
from hotsplit.artifacts.model_gguf import compute_model_id
from hotsplit.artifacts.predictor_file import LayerPredictor, Predictors
from hotsplit.artifacts.profile_file import EDGES, NUM_BINS, Profile
from hotsplit.errors import HotsplitError
from hotsplit.files.outputs import check_output
from hotsplit.system.sizes import format_bytes, parse_bytes

NAMES = (
    "model.gguf",
    "model.profile.safetensors",
    "machine.json",
    "model.split.gguf",
    "predictors.safetensors",
)


def make_predictors(**changes):
    random = np.random.default_rng(0)
    layers = tuple(
        LayerPredictor.of(
            down_RD=random.standard_normal((3, 8)).astype(np.float32),
            up_FR=random.standard_normal((10, 3)).astype(np.float32),
            up_bias_F=np.zeros(10, np.float32),
        )
        for _ in range(2)
    )
    info = PredictorInfo(kind="linear", rank_L=(3, 3), threshold_L=(0.5, float("-inf")))
    return dataclasses.replace(Predictors(model_id="ab", info=info, layers=layers), **changes)


def one_of_each(folder):
    """(path, artifact) of a valid model, profile, machine, split and predictors file."""
    model = dataclasses.replace(make_model(predictor_rank=4), path=folder / "model.gguf")
    split = make_split(model, [[4, 2], []])
    made = [model, make_profile(model), make_machine(), split, make_predictors()]
    for name, artifact in zip(NAMES, made, strict=True):
        artifact.save(folder / name)
    return [(folder / name, artifact) for name, artifact in zip(NAMES, made, strict=True)]


def plain(value):
    """The value in a form that `==` compares by content, without paths and with floats in f32."""
    if isinstance(value, float):
        return float(np.float32(value))  # what a GGUF key holds
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tobytes())
    if dataclasses.is_dataclass(value):
        read = {"read": plain(value.read())} if hasattr(value, "read") else {}
        names = [f.name for f in dataclasses.fields(value) if f.name != "read_rows"]
        fields = {name: plain(getattr(value, name)) for name in names}
        return {**fields, **read, **({"path": None} if "path" in fields else {})}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("index", range(5))
def test_round_trip(tmp_path, index):
    path, artifact = one_of_each(tmp_path)[index]
    again = type(artifact).load(path)
    assert plain(again) == plain(artifact)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused_in_one_line(tmp_path, index, share):
    path, artifact = one_of_each(tmp_path)[index]
    content = path.read_bytes()
    # Cut more than the padding: a GGUF file ends with up to 31 bytes of it.
    path.write_bytes(content[: min(int(share * len(content)), len(content) - 40)])
    with pytest.raises(HotsplitError) as error:
        type(artifact).load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("index", range(5))
def test_a_file_of_another_kind_and_a_missing_one_are_refused(tmp_path, index):
    files = one_of_each(tmp_path)
    kind = type(files[index][1])
    for other in range(5):
        if other != index:
            with pytest.raises(HotsplitError):
                kind.load(files[other][0])
    with pytest.raises(HotsplitError, match="no such file"):
        kind.load(tmp_path / "nowhere")
    with pytest.raises(HotsplitError, match="is a folder"):
        kind.load(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_another_version_is_refused(tmp_path, name):
    (path, artifact) = next(f for f in one_of_each(tmp_path) if f[0].name == name)
    content = path.read_bytes()
    new = {
        ".gguf": lambda c: c.replace(
            b"version" + struct.pack("<II", 4, 1), b"version" + struct.pack("<II", 4, 9)
        ),
        ".json": lambda c: c.replace(b'"version": 1', b'"version": 9'),
    }.get(path.suffix, lambda c: re.sub(rb'"version":"(\d)"', rb'"version":"9"', c))(content)
    assert new != content
    path.write_bytes(new)
    with pytest.raises(HotsplitError, match="version .*9.*, this program reads 1; .* again"):
        type(artifact).load(path)


def test_the_exact_bytes_of_a_tiny_split(tmp_path):
    """Compares the header with the numbers of tensors and keys, the tensor's entry and data, and
    one key."""
    model = make_model(sizes=make_sizes(num_neurons=32))
    split = make_split(model, [[7, 3], []])
    split.save(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    assert content[:24] == b"GGUF" + struct.pack("<IQQ", 3, 1, 32)
    name = b"blk.0.ffn_hot"
    tensor = struct.pack("<Q", 13) + name + struct.pack("<IQIQ", 1, 2, 26, 0)
    assert tensor in content
    assert content[-32:] == struct.pack("<ii", 7, 3) + bytes(24)
    key = b"hotsplit.split.hot_count"
    assert struct.pack("<Q", len(key)) + key + struct.pack("<IIQii", 9, 5, 2, 2, 0) in content


def test_the_exact_bytes_of_a_tiny_profile(tmp_path):
    histogram = np.zeros((1, NUM_BINS), np.int64)
    histogram[0, 5] = 4
    profile = Profile(
        model_id="m",
        num_tokens=2,
        threshold_L=(0.0,),
        corpora=(),
        active_count_LF=np.array([[2, 0]], np.int64),
        gate_histogram_LB=histogram,
    )
    profile.save(tmp_path / "p")
    content = (tmp_path / "p").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert header["__metadata__"] == {
        "format": "hotsplit.profile",
        "version": "1",
        "model_id": '"m"',
        "num_tokens": "2",
        "threshold_L": "[0.0]",
        "corpora": "[]",
        "quality": "{}",
        "arithmetic": "null",
    }
    start, end = header["active_count_LF"]["data_offsets"]
    assert content[8 + length + start : 8 + length + end] == struct.pack("<qq", 2, 0)
    assert (NUM_BINS, EDGES[1], EDGES[-1]) == (194, 2.0**-16, 2.0**8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_tokens": 1}, "counts from"),
        ({"threshold_L": (0.0,)}, "thresholds 1"),
        ({"active_count_LF": np.zeros((2, 96), np.float32)}, "int64"),
        ({"gate_histogram_LB": np.zeros((2, NUM_BINS), np.int64)}, "every neuron"),
    ],
)
def test_a_contradictory_profile_is_not_written(tmp_path, change, message):
    profile = dataclasses.replace(make_profile(make_model()), **change)
    with pytest.raises(HotsplitError, match=message):
        profile.save(tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_wrong_predictors_are_not_written(tmp_path):
    bad = make_predictors()
    bad.layers[1].up.data[3, 1] = np.nan
    with pytest.raises(HotsplitError, match="blk.1.ffn_pred_up.weight has NaN"):
        bad.save(tmp_path / "p")
    with pytest.raises(HotsplitError, match="1 predictors, 2 ranks"):
        make_predictors(layers=bad.layers[:1]).save(tmp_path / "p")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), "no tensor 'blk.1.ffn_up.weight'"),
        (
            lambda t: t.update({"blk.0.extra": t["output_norm.weight"]}),
            "unknown tensor 'blk.0.extra'",
        ),
        (lambda t: t.update({"output_norm.weight": t["blk.0.attn_q.weight"]}), "wanted"),
    ],
)
def test_a_model_with_other_tensors_is_refused(tmp_path, change, message):
    model = make_model()
    tensors = dict(model.tensors)
    change(tensors)
    with pytest.raises(HotsplitError, match=message):
        dataclasses.replace(model, tensors=tensors).save(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_split_that_exceeds_its_budget_is_not_written(tmp_path):
    split = make_split(make_model(), [[1], [2]])
    with pytest.raises(HotsplitError, match="for a budget of"):
        dataclasses.replace(split, vram_budget_bytes=split.vram_budget_bytes - 1).save(
            tmp_path / "s"
        )
    twice = (np.array([1, 1], np.int32), split.hot[1])
    with pytest.raises(HotsplitError, match="distinct"):
        dataclasses.replace(split, hot=twice).save(tmp_path / "s")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "difference",
    [
        {"num_layers": 3},
        {"num_layers": 1},
        {"width": 128, "head_width": 16},
        {"num_neurons": 128},
        {"num_kv_heads": 4},
        {"vocab_size": 300},
    ],
)
def test_a_plan_of_a_model_of_other_sizes_is_refused_whatever_its_id(tmp_path, difference):
    own, other = make_model(), make_model(sizes=make_sizes(**difference))
    other = dataclasses.replace(other, model_id=own.model_id)
    split = make_split(other, [np.arange(9)] * other.spec.num_layers)
    split.check_against(other, tmp_path / "plan")
    with pytest.raises(HotsplitError):
        split.check_against(own, tmp_path / "plan")


def test_model_id_depends_on_weights_and_config_but_not_on_their_order():
    samples = [("a", (2, 2), b"1234"), ("b", (1,), b"5")]
    base = compute_model_id({"x": 1, "transformers_version": "4"}, samples)
    assert base == compute_model_id({"transformers_version": "5", "x": 1}, samples[::-1])
    assert base != compute_model_id({"x": 2}, samples)
    assert base != compute_model_id({"x": 1}, [("a", (4,), b"1234"), samples[1]])
    assert base != compute_model_id({"x": 1}, [("a", (2, 2), b"1235"), samples[1]])
    digest = hashlib.sha256(b'{"x": 1}' + b"a[2, 2]1234" + b"b[1]5").hexdigest()
    assert base == digest


def test_outputs_are_checked_before_the_work(tmp_path):
    (tmp_path / "there").write_text("")
    with pytest.raises(HotsplitError, match="--force"):
        check_output(tmp_path / "there", force=False)
    check_output(tmp_path / "there", force=True)
    with pytest.raises(HotsplitError, match="is a folder"):
        check_output(tmp_path, force=True)
    with pytest.raises(HotsplitError, match="cannot be written"):
        check_output(tmp_path / "there" / "below", force=False)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_sizes_are_parsed():
    for text in ("8", "8GiB", "8G", "8g", "8192M", "8388608K"):
        assert parse_bytes(text) == 8 << 30
    found = [parse_bytes(text) for text in ("512 MiB", "1.5GB", "0", "1T")]
    assert found == [512 << 20, 1_500_000_000, 0, 1 << 40]


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 apples", "1e3", "٨GiB", "８GiB"])
def test_invalid_sizes_are_refused(text):
    with pytest.raises(HotsplitError, match="is not a size; wanted e.g. 8GiB"):
        parse_bytes(text)


def test_sizes_are_formatted():
    shown = [format_bytes(n) for n in (0, 1023, 1536, 3 << 30)]
    assert shown == ["0 B", "1023 B", "1.50 KiB", "3.00 GiB"]

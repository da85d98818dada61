"""Our own files with values of any type in any place: `inspect` shows them or refuses them in
one line, and refuses meaningless values; `export` refuses the files that it gets here.

No oracle is needed beyond survival and lists of the values that must be refused."""

import copy
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest
from models import make_machine, make_model, make_profile
from test_runtime import make_split

from hotsplit.artifacts import predictor_file, profile_file
from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import ModelFile, PredictorInfo
from hotsplit.artifacts.model_gguf import SPLIT_ARCHITECTURE
from hotsplit.artifacts.predictor_file import LayerPredictor, Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.costs.part_bytes import ITEMS
from hotsplit.errors import HotsplitError
from hotsplit.files.declared import Count, Lax, Line, NotNaN, Positive, Share, read_declared
from hotsplit.files.gguf_file import read_gguf, write_gguf
from hotsplit.files.safetensors_file import load_arrays, save_arrays
from hotsplit.inspection.file_summary import to_json
from hotsplit.inspection.inspect_file import inspect_file

VALUES = [None, "x", "", "\x1b[31m\n", -1, 0, 0.5, 10**19, 10**400, math.nan, math.inf, True]
VALUES += [[], [None], ["x"], [math.inf], {}, {"a": 1}]
# GGUF has neither null nor objects.
GGUF_VALUES = ["x", "", "\x1b[31m\n", np.int32(-1), np.uint32(0), np.float32(0.5), np.uint64(2**63)]
GGUF_VALUES += [np.float64("nan"), np.float32("inf"), np.float64("-inf"), True]
GGUF_VALUES += [["x"], [0.5], [math.inf], [1], [-1, 0, 0]]
# Read by the same lines as others.
ALIKE = (
    "host_to_device_gb_per_s host_to_device_pageable_gb_per_s copy_latency_s bandwidth_gb_per_s"
    " chosen_rows_gb_per_s kernel_s token_s hand_over_s cpu_run_s 2"
)
SPLIT = "hotsplit.split."


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def model():
    return make_model()


def outcome(path: Path) -> str:
    """The word "shown", or the message of a refusal, which is one printable line."""
    try:
        summary = inspect_file(path)
        json.loads(to_json(summary))
        summary.print(all_tensors=True)
    except HotsplitError as error:
        assert "\n" not in str(error) and "\x1b" not in str(error) and len(str(error)) < 600
        return str(error)
    return "shown"


def places(values: object, path: tuple = ()) -> list[tuple]:
    """The places of an object's values, nested ones included."""
    found = [path] if path else []
    items = (
        values.items()
        if isinstance(values, dict)
        else enumerate(values)
        if isinstance(values, list)
        else ()
    )
    return found + [place for key, value in items for place in places(value, (*path, key))]


def with_value(values: dict, path: tuple, value: object) -> dict:
    changed = at = copy.deepcopy(values)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def outcomes(path: Path, values: dict, write) -> dict[tuple, str]:
    """The outcome for every value in every place of an object, except places that are read
    alike."""
    found = {}
    for place in [place for place in places(values) if not {*ALIKE.split()} & set(place)]:
        for number, value in enumerate(VALUES):
            write(with_value(values, place, value))
            found[*place, number] = outcome(path)
    return found


def refused(found: dict[tuple, str], *place) -> set[int]:
    """The numbers of the values that are refused in this place."""
    return {key[-1] for key, said in found.items() if key[:-1] == place and said != "shown"}


def test_wrong_values_in_a_machine_file_are_refused(tmp_path, capsys):
    path = tmp_path / "m.json"
    make_machine().save(path)
    values = json.loads(path.read_text())
    found = outcomes(path, values, lambda v: path.write_text(json.dumps(v)))
    every = set(range(len(VALUES)))
    numbers = {4, 5, 6, 7}
    assert refused(found, "versions") == every - {VALUES.index({})}
    assert refused(found, "free_bytes") >= every - numbers
    assert refused(found, "gpus", 0, "launch_s", "best") >= every - numbers
    assert refused(found, "cpu_name") == every - {1, 2}
    path.write_text(json.dumps(values))
    assert outcome(path) == "shown" and Machine.load(path)


def test_wrong_values_in_profiles_and_predictors_are_refused(tmp_path, model, capsys):
    path = tmp_path / "p.safetensors"
    every = set(range(len(VALUES)))
    make_profile(model).save(path)
    metadata, arrays = load_arrays(path, "hotsplit.profile", profile_file.VERSION)

    def write(values):
        save_arrays(path, "hotsplit.profile", profile_file.VERSION, values, arrays)

    found = outcomes(path, metadata, write)
    assert refused(found, "model_id") == every - {1, 2}
    assert refused(found, "threshold_L") == refused(found, "num_tokens") == every
    assert refused(found, "threshold_L", 0) >= {0, 1, 9, 10, 11, 12}
    assert refused(found, "corpora") == every - {VALUES.index([])}
    weights = np.ones((4, 64), np.float32)
    layer = LayerPredictor.of(down_RD=weights, up_FR=np.ones((160, 4), np.float32))
    info = PredictorInfo(kind="linear", rank_L=(4,), threshold_L=(0.0,), density_L=(0.5,))
    Predictors(model_id="a", info=info, layers=(layer,)).save(path)
    metadata, arrays = load_arrays(path, "hotsplit.predictors", predictor_file.VERSION)

    def write(values):
        save_arrays(path, "hotsplit.predictors", predictor_file.VERSION, values, arrays)

    found = outcomes(path, metadata, write)
    assert refused(found, "model_id") == every - {0, 1, 2}
    assert refused(found, "info") == refused(found, "info", "kind") == every


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_a_profile_without_counts_is_refused(tmp_path, model, capsys, shape):
    path = tmp_path / "p.safetensors"
    make_profile(model).save(path)
    metadata, arrays = load_arrays(path, "hotsplit.profile", profile_file.VERSION)
    metadata["threshold_L"] = [0.0] * shape[0]
    arrays["active_count_LF"] = np.zeros(shape, np.int64)
    arrays["gate_histogram_LB"] = np.zeros((shape[0], arrays["gate_histogram_LB"].shape[1]), int)
    save_arrays(path, "hotsplit.profile", profile_file.VERSION, metadata, arrays)
    assert "counts are" in outcome(path)
    out = str(tmp_path / "activation")
    assert main(["export", str(path), "--format", "powerinfer-activations", "-o", out]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_wrong_values_in_a_plan_are_refused(tmp_path, model, capsys):
    path, profile = tmp_path / "s.gguf", tmp_path / "p.safetensors"
    make_profile(model).save(profile)
    hot = [np.arange(9, dtype=np.int32)] * model.spec.num_layers
    make_split(model, hot).save(path)
    keys, tensors = read_gguf(path, "split")
    keys.pop("general.architecture")
    said = {}
    alike = tuple(item for item in ITEMS if item != "neurons")  # read by the same line
    for key in [k for k in keys if k.startswith(SPLIT) and not k.endswith(alike)]:
        for number, value in enumerate(GGUF_VALUES):
            write_gguf(path.with_name("x"), SPLIT_ARCHITECTURE, keys | {key: value}, tensors)
            name = key.removeprefix(SPLIT)
            said[name, number] = outcome(path.with_name("x"))
    every = set(range(len(GGUF_VALUES)))
    assert refused(said, "objective_s") >= every - {5, 6}
    assert refused(said, "hot_count") == every
    assert refused(said, "context_length") == every
    assert refused(said, "gpu_bytes.neurons") >= every - {4}
    assert refused(said, "solve_s") == every - {4, 5, 6}
    assert refused(said, "model_id") == every - {0}  # the writer leaves out empty texts
    write_gguf(
        path, SPLIT_ARCHITECTURE, keys | {SPLIT + "gpu_bytes.neurons": np.float32("inf")}, tensors
    )
    arguments = ["--profile", str(profile), "-o", str(tmp_path / "o"), "--format", "gpuidx"]
    capsys.readouterr()
    assert main(["export", str(path), *arguments]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_token_ids_that_are_not_integers_are_not_shown(tmp_path, model, capsys):
    path = tmp_path / "m.gguf"
    for value in (np.float32("nan"), np.float32("inf"), np.uint32(3), "x"):
        keys = {**model._own_keys(), "tokenizer.ggml.eos_token_id": value}
        write_gguf(path, "llama", keys, model.tensors)
        assert outcome(path) == "shown"
        shown = inspect_file(path).tokenizer.special_ids
        assert shown == ({"eos": 3} if isinstance(value, np.uint32) else {})


DEEP = {
    "deep.json": b'{"a": ' + b"[" * 100_000,
    "deep.safetensors": (100_000).to_bytes(8, "little") + b'{"a":' + b"[" * 99_995,
    "long.json": b'{"format": ' + b"9" * 5_000 + b"}",
    "list.json": b'{"format": ["x"]}',
}


@pytest.mark.parametrize("name", DEEP)
def test_json_beyond_what_a_parser_can_take_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(DEEP[name])
    assert outcome(tmp_path / name) != "shown"


def test_plans_and_profiles_load_only_as_what_they_are(tmp_path, model):
    hot = [np.arange(9, dtype=np.int32)] * model.spec.num_layers
    split = make_split(model, hot)
    split.save(tmp_path / "s.gguf")
    again = Split.load(tmp_path / "s.gguf")
    assert (again.objective_s, again.gpu_bytes) == (split.objective_s, split.gpu_bytes)
    with pytest.raises(HotsplitError, match=r"s\.gguf: is a split file; give the model .*--split"):
        ModelFile.load(tmp_path / "s.gguf")
    make_profile(model).save(tmp_path / "p")
    assert Profile.load(tmp_path / "p").corpora == make_profile(model).corpora
    with pytest.raises(HotsplitError, match="p: a safetensors file, as profiles .* wanted a split"):
        Split.load(tmp_path / "p")
    with pytest.raises(HotsplitError, match=r"s\.gguf: a GGUF file, as models and splits"):
        Profile.load(tmp_path / "s.gguf")
    (tmp_path / "m.json").write_text("{}")
    with pytest.raises(HotsplitError, match=r"m\.json: a JSON file, as machine files are; wanted"):
        Profile.load(tmp_path / "m.json")
    with pytest.raises(HotsplitError, match="is a folder; wanted a model .*hotsplit convert"):
        ModelFile.load(tmp_path)


@dataclass
class Inner:
    b: Line
    c: float = 0.0


@dataclass
class Declared:
    a: Count = 0
    f: Positive = 1.0
    flag: bool = True
    t: NotNaN = 0.0
    mode: Literal["x", "y"] = "x"
    inner: Inner | None = None
    by: dict[int, Inner] = field(default_factory=dict)
    shares: tuple[Share, ...] = ()
    numbers: tuple[Annotated[int, Lax], ...] = ()


@pytest.mark.parametrize(
    "values, words",
    [
        ({"a": 1.0}, "a is 1.0, wanted a whole number"),
        ({"a": True}, "a is True, wanted a whole number"),
        ({"a": "1"}, "a is '1', wanted a whole number"),
        ({"a": -1}, "a is -1, wanted at least 0"),
        ({"a": 10**400}, "more than 60 digits, wanted at most 9223372036854775807"),
        ({"f": 0}, "f is 0, wanted more than 0"),
        ({"f": 10**400}, "more than 60 digits, wanted a finite number"),
        ({"f": math.inf}, "f is inf, wanted a finite number"),
        ({"t": math.nan}, "t is nan, wanted at least -inf"),
        ({"flag": 1}, "flag is 1, wanted true or false"),
        ({"mode": "z"}, "mode is 'z', wanted 'x' or 'y'"),
        ({"inner": {"b": 3}}, "inner.b is 3, wanted a string"),
        ({"inner": {"b": "two\nlines"}}, "inner.b is .*, wanted a one-line string"),
        ({"inner": {}}, "key 'inner.b' is missing"),
        ({"inner": {"b": "", "d": 1}}, "key 'inner.d' is unknown"),
        ({"inner": 3}, "inner is 3, wanted an object"),
        ({"by": {"x": {"b": ""}}}, "by.x is 'x', wanted a whole number"),
        ({"shares": [0, "x"]}, r"shares\[1\] is 'x', wanted a number"),
        ({"shares": [0.5, 2]}, r"shares\[1\] is 2, wanted at most 1"),
        ({"shares": {}}, "shares is {}, wanted a list"),
        ({"numbers": ["a"]}, "wanted a whole number"),
        ({"numbers": json.loads("[" * 500 + "]" * 500)}, "cannot be read .recursion limit"),
        ({"k" * 100_000: 1}, "is unknown"),
        (3, "the content is 3, wanted an object"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_name(values, words):
    with pytest.raises(HotsplitError, match=words) as refused:
        read_declared(Declared, values)
    assert len(str(refused.value)) < 200


def test_numbers_of_numpy_and_gguf_are_taken():
    values = {"a": np.uint32(3), "f": np.float32(0.5), "t": -math.inf, "numbers": ["7"]}
    assert read_declared(Declared, values) == Declared(3, 0.5, t=-math.inf, numbers=(7,))

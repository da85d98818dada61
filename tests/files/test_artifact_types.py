"""Values of a wrong kind in our own files: their readers refuse them by name, in one line. The fuzz
tests (tests/damage) try any value in any place."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest
from models import make_model, make_profile
from test_runtime import make_split

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.files.declared import Count, Lax, Line, NotNaN, Positive, Share, read_declared
from hotsplit.files.gguf_file import write_gguf
from hotsplit.inspection.file_summary import to_json
from hotsplit.inspection.inspect_file import inspect_file


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
        assert "\x1b" not in str(error) and len(str(error)) < 600
        return str(error)
    return "shown"


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

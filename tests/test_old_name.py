"""Files that were made under the program's old name are refused with one line that says so."""

import json

import numpy as np
import pytest
from models import make_machine, make_model, make_profile

from hotsplit.artifacts import machine_file, profile_file
from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.artifacts.split_file import Split
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry, write_gguf

REFUSAL = "was made under this program's old name"


def test_a_model_is_refused(tmp_path):
    keys = {"sparkinfer.version": np.uint32(1), "llama.block_count": np.uint32(1)}
    write_gguf(tmp_path / "m.gguf", "llama", keys, {"x": array_entry(np.zeros(32), "f32")})
    with pytest.raises(HotsplitError, match=REFUSAL):
        ModelFile.load(tmp_path / "m.gguf")


def test_a_plan_is_refused(tmp_path):
    write_gguf(tmp_path / "s.gguf", "sparkinfer-split", {}, {"x": array_entry(np.zeros(32), "f32")})
    with pytest.raises(HotsplitError, match=REFUSAL):
        Split.load(tmp_path / "s.gguf")


def test_a_profile_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(profile_file, "FORMAT", "sparkinfer.profile")
        make_profile(make_model()).save(tmp_path / "p")
    with pytest.raises(HotsplitError, match=REFUSAL):
        Profile.load(tmp_path / "p")


def test_a_machine_file_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(machine_file, "FORMAT", "sparkinfer.machine")
        make_machine().save(tmp_path / "m.json")
    with pytest.raises(HotsplitError, match=REFUSAL):
        Machine.load(tmp_path / "m.json")


def test_files_of_sparkinfer_itself_are_not_taken_for_ours(tmp_path):
    """Its model-split has no key of our old name."""
    keys = {"ffn_group_size": np.int32(16)}
    entries = {"blk.0.ffn_reorder_perms": array_entry(np.zeros(32), "f32")}
    write_gguf(tmp_path / "m-6.gguf", "sparkinfer-model-split", keys, entries)
    with pytest.raises(HotsplitError) as error:
        Split.load(tmp_path / "m-6.gguf")
    assert REFUSAL not in str(error.value)


def test_what_is_refused_is_named(tmp_path):
    (tmp_path / "m.json").write_text(json.dumps({"format": "sparkinfer.machine", "version": 4}))
    with pytest.raises(HotsplitError, match=r"m\.json: .*'sparkinfer\.machine'.*convert"):
        Machine.load(tmp_path / "m.json")

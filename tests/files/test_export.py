"""Exports: GGUF containers, read back by a byte reader that shares no code with the writers, and
PowerInfer's activations, read with torch."""

import dataclasses
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from models import (
    make_profile,
    make_sizes,
    save_solver_files,
    shape_only,
    solver_files,
    take_workspace,
)
from test_llamacpp_options import inputs_of as of_mixture
from test_runtime import make_split
from test_solver_experts import save as save_mixture

from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.export import expert_counts
from hotsplit.export.export import ExportConfig, check_belongs, dense_on_cpu, export
from hotsplit.export.powerinfer import write_index
from hotsplit.solver.solve import SolveConfig, solve

POWERINFER_I32, GGML_I32 = 18, 26  # PowerInfer keeps the type numbers of 2023
NEURONS = 64
SCALARS = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 12: "<d"}


class Bytes:
    """A GGUF container, read byte by byte. `tensors` is [(name, type, values)] in file order."""

    def __init__(self, content: bytes):
        self.content, self.at = content, 0
        self.magic = self.take(4)
        self.version, num_tensors, num_keys = self.numbers("<IQQ")
        self.keys = {self.text(): self.value(self.numbers("<I")[0]) for _ in range(num_keys)}
        infos = []
        for _ in range(num_tensors):
            name, (num_dims,) = self.text(), self.numbers("<I")
            infos.append((name, self.numbers(f"<{num_dims}Q"), *self.numbers("<IQ")))
        start = -(-self.at // 32) * 32
        self.tensors = []
        for name, dims, kind, offset in infos:
            assert offset % 32 == 0 and kind in (POWERINFER_I32, GGML_I32)
            count = math.prod(dims)
            assert start + offset + 4 * count <= len(content)
            values = struct.unpack_from(f"<{count}i", content, start + offset)
            self.tensors.append((name, kind, list(values)))

    def take(self, count):
        self.at += count
        return self.content[self.at - count : self.at]

    def numbers(self, form):
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def text(self):
        return self.take(self.numbers("<Q")[0]).decode()

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.numbers("<IQ")
            return [self.value(inner) for _ in range(count)]
        return (kind, self.numbers(SCALARS[kind])[0])


def index_hot(path: Path) -> list[set[int]]:
    """The hot neurons of each layer, found as PowerInfer's loader finds them: by position."""
    file = Bytes(path.read_bytes())
    layers = []
    for layer in range(len(file.tensors) // 2):
        (idx_name, idx_kind, idx), (bucket_name, bucket_kind, bucket) = file.tensors[
            2 * layer : 2 * layer + 2
        ]
        assert (idx_name, bucket_name) == (f"blk.{layer}.gpu_idx", f"blk.{layer}.gpu_bucket")
        assert idx_kind == bucket_kind == POWERINFER_I32
        assert len(idx) == NEURONS and set(idx) <= {0, 1}
        assert bucket == [neuron for neuron, flag in enumerate(idx) if flag]
        layers.append(set(bucket))
    return layers


def make_hot(num_layers, seed=0):
    """A random number of random neurons in each layer; none in the second, all in the last."""
    random = np.random.default_rng(seed)
    hot = [random.permutation(NEURONS)[: 1 + random.integers(NEURONS)] for _ in range(num_layers)]
    hot[1], hot[-1] = np.zeros(0), random.permutation(NEURONS)
    return hot


@pytest.fixture
def make(tmp_path):
    """A function that writes a split and a profile of one model, and returns both."""

    def _make(num_layers=3, hot=None, **options):
        model = shape_only(make_sizes(num_layers=num_layers, num_neurons=NEURONS))
        split = make_split(model, make_hot(num_layers) if hot is None else hot, **options)
        profile = make_profile(model, num_tokens=50)  # few tokens: many ties
        split.save(tmp_path / "m.split.gguf")
        profile.save(tmp_path / "p.safetensors")
        return split, profile

    return _make


def plan(tmp_path, form, name, **options):
    return ExportConfig(
        source=tmp_path / "m.split.gguf",
        profile=tmp_path / "p.safetensors",
        format=form,
        output=tmp_path / name,
        **options,
    )


# ---- PowerInfer's index --------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [3, 32, 40])
def test_the_index_holds_the_same_neurons_in_the_same_layers(tmp_path, make, num_layers):
    split, _ = make(num_layers)
    report = export(plan(tmp_path, "gpuidx", "m.gguf.generated.gpuidx"))
    assert index_hot(report.output) == [set(ids.tolist()) for ids in split.hot]
    file = Bytes(report.output.read_bytes())
    assert (file.magic, file.version) == (b"PWRI", 3)
    assert file.keys == {
        "general.architecture": "generic.gpu_index",
        "generic.gpu_index.block_count": (4, num_layers),
        "split.vram_capacity": (10, split.gpu_bytes["neurons"]),
    }
    assert report.num_bytes == report.output.stat().st_size
    assert report.num_hot == sum(len(ids) for ids in split.hot)


def test_the_reader_finds_swapped_layers(tmp_path, make):
    """The effect of a text sort from eleven layers on: layer 10 in the place of layer 2."""
    split, profile = make(12)
    order = sorted(range(12), key=lambda layer: f"activation_{layer}.pt")
    assert order != list(range(12))
    wrong = make_split(
        shape_only(make_sizes(num_layers=12, num_neurons=NEURONS)), [split.hot[i] for i in order]
    )
    write_index(wrong, NEURONS, tmp_path / "wrong")
    assert index_hot(tmp_path / "wrong") != [set(ids.tolist()) for ids in split.hot]
    assert index_hot(tmp_path / "wrong") == [set(split.hot[i].tolist()) for i in order]


def test_a_tiny_index_byte_by_byte(tmp_path):
    """Two layers of three neurons: 2 and 0 are hot in the first, none in the second. The bytes are
    those that PowerInfer's export_split.py (commit d3ebd7c) writes for this choice."""
    model = shape_only(make_sizes(num_layers=2, num_neurons=3), kind="f32")
    split = make_split(model, [[2, 0], []])
    capacity = 2 * 3 * 64 * 4  # hot neurons, rows of a neuron, width, bytes of a value
    assert split.gpu_bytes["neurons"] == capacity
    write_index(split, 3, tmp_path / "x")

    def text(value):
        return struct.pack("<Q", len(value)) + value

    def info(name, count, offset):
        return text(name) + struct.pack("<IQIQ", 1, count, 18, offset)

    header = (
        b"PWRI"
        + struct.pack("<IQQ", 3, 4, 3)
        + text(b"general.architecture")
        + struct.pack("<I", 8)
        + text(b"generic.gpu_index")
        + text(b"generic.gpu_index.block_count")
        + struct.pack("<II", 4, 2)
        + text(b"split.vram_capacity")
        + struct.pack("<IQ", 10, capacity)
        + info(b"blk.0.gpu_idx", 3, 0)
        + info(b"blk.0.gpu_bucket", 2, 32)
        + info(b"blk.1.gpu_idx", 3, 64)
        + info(b"blk.1.gpu_bucket", 0, 96)
    )
    header += bytes(-len(header) % 32)
    data = struct.pack("<3i20x", 1, 0, 1) + struct.pack("<2i24x", 0, 2) + bytes(32)
    assert (tmp_path / "x").read_bytes() == header + data


def test_notes_say_what_the_index_cannot_hold(tmp_path, make):
    make(dense_on_gpu=False, head_on_gpu=False)
    notes = " ".join(export(plan(tmp_path, "gpuidx", "x")).notes)
    assert "attention, norms and predictors of 3 layers and the output head on the CPU" in notes
    assert ".generated.gpuidx" in notes and "mode exact" in notes
    assert dense_on_cpu(make(1, hot=[np.arange(3)], dense_on_gpu=False)[0]) == (
        "the attention, norms and predictors of 1 layer"
    )
    make()
    notes = " ".join(export(plan(tmp_path, "gpuidx", "m.generated.gpuidx")).notes)
    assert "on the CPU" not in notes and ".generated.gpuidx" not in notes


# ---- SparkInfer's model-split --------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [3, 32, 40])
@pytest.mark.parametrize("group_size", [1, 16, 64])
def test_the_model_split_orders_hot_to_cold(tmp_path, make, num_layers, group_size):
    split, profile = make(num_layers)
    config = plan(tmp_path, "sparkinfer-split", f"m-{NEURONS // group_size}.gguf")
    file = Bytes(export(config).output.read_bytes())
    assert (file.magic, file.version) == (b"GGUF", 3)
    assert file.keys.pop("ffn_group_size") == (5, group_size)
    pattern = file.keys.pop("ffn_normalized_pattern")
    total = sum(len(ids) for ids in split.hot)
    assert [kind for kind, _ in pattern] == [6] * num_layers
    assert np.allclose([share for _, share in pattern], [len(i) / total for i in split.hot], 1e-6)
    assert abs(sum(share for _, share in pattern) - 1) < 1e-5
    assert list(file.keys) == ["general.architecture"]
    assert len(file.tensors) == num_layers
    found = {name: values for name, kind, values in file.tensors if kind == GGML_I32}
    for layer, (ids, count_F) in enumerate(zip(split.hot, profile.active_count_LF, strict=True)):
        perm = found[f"blk.{layer}.ffn_reorder_perms"]
        cold = set(range(NEURONS)) - set(ids.tolist())
        assert perm == ids.tolist() + sorted(cold, key=lambda neuron: (-count_F[neuron], neuron))


def test_the_name_says_the_size_of_groups_and_partial_ones_are_noted(tmp_path, make):
    make(hot=[range(16), range(5), range(32)], dense_on_gpu=False)
    report = export(plan(tmp_path, "sparkinfer-split", "m-4.gguf"))
    assert report.group_size == 16
    notes = " ".join(report.notes)
    assert "in 1 of 3 layers" in notes
    assert "of 3 layers on the CPU" in notes
    make(hot=[range(16), range(0), range(32)])
    notes = " ".join(export(plan(tmp_path, "sparkinfer-split", "m-4.gguf", force=True)).notes)
    assert "in 1 of 3 layers no neuron is hot" in notes
    assert "whole groups" not in notes


@pytest.mark.parametrize(
    "name", ["m.gguf", "m-14.gguf", "m-4.bin", "m-0.gguf", "m-128.gguf", "m-x.gguf"]
)
def test_wrong_groups_and_names_are_refused_with_the_right_one(tmp_path, make, name):
    make()
    with pytest.raises(HotsplitError, match=r"use .*/m(-x)?-4.gguf$"):
        export(plan(tmp_path, "sparkinfer-split", name))
    assert {path.name for path in tmp_path.iterdir()} == {"m.split.gguf", "p.safetensors"}


def test_more_than_1024_groups_are_refused(tmp_path):
    model = shape_only(make_sizes(num_layers=1, num_neurons=2050))
    make_split(model, [[0]]).save(tmp_path / "m.split.gguf")
    make_profile(model).save(tmp_path / "p.safetensors")
    with pytest.raises(HotsplitError, match="at most 1024, .* use .*m-205.gguf$"):
        export(plan(tmp_path, "sparkinfer-split", "m-1025.gguf"))
    export(plan(tmp_path, "sparkinfer-split", "m-410.gguf"))


def test_a_plan_without_hot_neurons_has_no_pattern(tmp_path, make):
    make(hot=[[], [], []])
    with pytest.raises(HotsplitError, match="0 of 0.*larger --vram-budget"):
        export(plan(tmp_path, "sparkinfer-split", "m-4.gguf"))
    report = export(plan(tmp_path, "gpuidx", "m.generated.gpuidx"))
    assert index_hot(report.output) == [set(), set(), set()]


# ---- PowerInfer's activations --------------------------------------------------------------


def activations(tmp_path, **options):
    return ExportConfig(
        source=tmp_path / "p.safetensors",
        output=tmp_path / "activation",
        format="powerinfer-activations",
        **options,
    )


@pytest.mark.parametrize("num_layers", [3, 32, 40])
def test_activations_are_the_counts_layer_by_layer(tmp_path, make, num_layers):
    _, profile = make(num_layers)
    report = export(activations(tmp_path))
    assert {p.name for p in report.output.iterdir()} == {
        f"activation_{layer}.pt" for layer in range(num_layers)
    }
    for layer, count_F in enumerate(profile.active_count_LF):
        read = torch.load(report.output / f"activation_{layer}.pt", weights_only=True)
        assert read.dtype == torch.int64 and read.shape == (NEURONS,)
        assert read.tolist() == count_F.tolist()
        # The sums that PowerInfer's solver.py computes.
        assert (read * -1.0).view(-1, 16).sum(dim=1).sum() == -count_F.sum()
    assert ("text order" in " ".join(report.notes)) == (num_layers > 10)
    assert "multiple of 256" in " ".join(report.notes)
    swapped = torch.load(report.output / "activation_2.pt", weights_only=True)
    assert swapped.tolist() != profile.active_count_LF[1].tolist()


def test_an_interrupted_export_leaves_the_old_folder(tmp_path, make, monkeypatch):
    make()
    export(activations(tmp_path))
    with pytest.raises(HotsplitError, match="--force"):
        export(activations(tmp_path))
    before = {p.name: p.read_bytes() for p in (tmp_path / "activation").iterdir()}
    make(4)
    write = Path.write_bytes

    def fail_at_the_third(path, data):
        if path.name == "activation_2.pt":
            raise KeyboardInterrupt
        return write(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", fail_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            export(activations(tmp_path, force=True))
    assert {p.name: p.read_bytes() for p in (tmp_path / "activation").iterdir()} == before
    assert export(activations(tmp_path, force=True)).num_layers == 4
    assert len(list((tmp_path / "activation").iterdir())) == 4
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_with_other_files_is_never_replaced(tmp_path, make):
    make()
    (tmp_path / "activation").mkdir()
    (tmp_path / "activation" / "thesis.tex").write_text("years of work")
    with pytest.raises(HotsplitError, match="holds 'thesis.tex'"):
        export(activations(tmp_path, force=True))
    assert (tmp_path / "activation" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "activation" / "thesis.tex").unlink()
    export(activations(tmp_path))  # an empty folder may be replaced


# ---- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gpuidx", "sparkinfer-split"])
def test_a_profile_of_another_model_or_shape_is_refused(tmp_path, make, form):
    make()
    other = make_profile(shape_only(make_sizes(num_layers=3, num_neurons=NEURONS), kind="f16"))
    for changes in ({"model_id": "another"}, {"active_count_LF": other.active_count_LF[:, :9]}):
        wrong = make_profile(shape_only(make_sizes(num_layers=3, num_neurons=NEURONS)))
        changed = {**vars(wrong), **changes}
        num_neurons = changed["active_count_LF"].shape[1]
        changed["gate_histogram_LB"] = wrong.gate_histogram_LB * num_neurons // NEURONS
        type(wrong)(**changed).save(tmp_path / "p.safetensors")
        with pytest.raises(HotsplitError, match="made for model|not among the 9 of"):
            export(plan(tmp_path, form, "m-4.gguf"))
    assert not (tmp_path / "m-4.gguf").exists()


def test_a_plan_of_another_number_of_layers_is_refused(make):
    split, profile = make()
    check_belongs(split, Path("plan"), profile, Path("profile"))
    fewer = dataclasses.replace(split, hot=split.hot[:2])
    with pytest.raises(HotsplitError, match="^plan: has 2 layers, but profile 3; run"):
        check_belongs(fewer, Path("plan"), profile, Path("profile"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "gpuidx"}, "needs --profile"),
        ({"format": "sparkinfer-split"}, "needs --profile"),
        ({"format": "onnx"}, "unknown; known: powerinfer-activations"),
        ({"format": "powerinfer-activations", "profile": Path("p")}, "given as SOURCE"),
    ],
)
def test_conflicting_options_are_refused(options, said):
    with pytest.raises(HotsplitError, match=said):
        ExportConfig(source=Path("a"), output=Path("b"), **options)


def test_the_wrong_kind_of_source_and_an_existing_output(tmp_path, make):
    make()
    plan_file, profile, output = (
        tmp_path / name for name in ("m.split.gguf", "p.safetensors", "x")
    )
    with pytest.raises(HotsplitError, match="p.safetensors"):
        export(ExportConfig(source=profile, profile=profile, format="gpuidx", output=output))
    with pytest.raises(HotsplitError, match="m.split.gguf"):
        export(ExportConfig(source=plan_file, output=output, format="powerinfer-activations"))
    with pytest.raises(HotsplitError, match="read by this command"):
        export(plan(tmp_path, "gpuidx", "m.split.gguf", force=True))
    export(plan(tmp_path, "gpuidx", "x"))
    with pytest.raises(HotsplitError, match="--force"):
        export(plan(tmp_path, "gpuidx", "x"))
    export(plan(tmp_path, "gpuidx", "x", force=True))


def test_the_command_line(tmp_path, make, capsys):
    make()
    words = (
        f"{tmp_path}/m.split.gguf --format sparkinfer-split --profile {tmp_path}/p.safetensors -o"
    )
    arguments = ["export", *words.split()]
    assert main([*arguments, str(tmp_path / "m-4.gguf"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_units"], report["group_size"]) == (NEURONS, 16)
    assert main([*arguments, str(tmp_path / "m.gguf")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "m-4.gguf" in err


# ---- counts of experts -----------------------------------------------------------------------


def mixture(folder):
    """A profile of a mixture whose first layer has no experts, and a plan for it."""
    inputs = of_mixture(0.4, num_layers=4, num_dense=1)
    save_mixture(folder, inputs.model, inputs.profile, inputs.machine)
    config = SolveConfig(
        **solver_files(folder), output=folder / "plan", vram_budget_bytes=inputs.budgets[0]
    )
    solve(config, take_workspace)
    return inputs.profile, Split.load(folder / "plan")


def chosen_by_ktransformers(path, ratio, num_mixed):
    """Its rule (kt_ep_wrapper.py, experts_base.py): the largest f32 sums of all layers."""
    loaded = torch.load(path, weights_only=True)["logical_count"]
    assert loaded.dim() == 3
    score_LE = loaded.sum(dim=0).float()
    count = int(num_mixed * score_LE.shape[1] * ratio)
    mask = torch.zeros(score_LE.numel(), dtype=torch.bool)
    mask[torch.topk(score_LE.view(-1), k=count).indices] = True
    return mask.view(score_LE.shape).numpy()


@pytest.mark.parametrize("factor", [1, 1 << 30])
def test_ktransformers_chooses_the_experts_of_a_plan(tmp_path, capsys, factor):
    profile, split = mixture(tmp_path)
    output = tmp_path / "counts.pt"
    many = dataclasses.replace(profile, expert_count_LE=profile.expert_count_LE.astype(np.int64))
    scores = expert_counts.of_plan(many.expert_count_LE * factor, split)
    assert scores.max() < 1 << 24
    command = ["export", str(tmp_path / "plan"), "--format", "ktransformers", "-o", str(output)]
    assert main([*command, "--profile", str(tmp_path / "p")]) == 0
    ratio = float(capsys.readouterr().err.split("--kt-gpu-experts-ratio ")[1].split()[0])
    if factor > 1:
        expert_counts.write_ktransformers(scores, output)
    mask_LE = chosen_by_ktransformers(output, ratio, 3)
    for layer in (1, 2, 3):
        assert set(np.flatnonzero(mask_LE[layer])) == set(split.hot[layer].tolist())
    assert 0 < mask_LE.sum() < 24 and not mask_LE[0].any()


def test_counts_of_a_profile_are_written_as_they_are(tmp_path):
    profile, _ = mixture(tmp_path)
    command = ["export", str(tmp_path / "p"), "-o"]
    assert main([*command, str(tmp_path / "c.pt"), "--format", "ktransformers"]) == 0
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)["logical_count"]
    assert np.array_equal(loaded[0].numpy(), profile.expert_count_LE)
    assert main([*command, str(tmp_path / "c.json"), "--format", "eplb"]) == 0
    found = json.loads((tmp_path / "c.json").read_text())
    assert found == {"logical_count": profile.expert_count_LE.tolist()}
    assert not any(found["logical_count"][0]) and all(map(any, found["logical_count"][1:]))


def test_what_counts_cannot_be_made_of_is_refused(tmp_path, capsys, monkeypatch):
    mixture(tmp_path)
    (tmp_path / "dense").mkdir()
    save_solver_files(tmp_path / "dense")
    monkeypatch.chdir(tmp_path)
    for command, words in (
        ("p -o c.txt --format eplb", "ends in .json"),
        ("plan -o c.json --format eplb --profile p", "leave --profile out"),
        ("dense/p -o c.json --format eplb", "a model without experts"),
        ("plan -o c.pt --format ktransformers --profile dense/p", "without experts"),
    ):
        assert main(["export", *command.split()]) == 1
        assert words in capsys.readouterr().err

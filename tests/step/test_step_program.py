"""The step program: any order of its operations that their declared reads and writes allow gives
the same bits, on the host alone and with plans; a read or write that is not declared is found. The
forms made from files and from weights agree, and the documents show what `inspect` prints."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from hybrid_plans import ALL, NONE, SOME
from models import FAMILIES, family_model, family_spec, make_model, make_sizes
from paths import ROOT
from replay import Replay, take
from test_runtime import IDS, make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import PredictorInfo
from hotsplit.cli import main
from hotsplit.costs.part_bytes import plan_bytes
from hotsplit.model.spec import Predict
from hotsplit.options.key_selection import KeySelection
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.step.forms import host_form, placed_form
from hotsplit.runtime.step.program import HOST, LayerPlace, edges, gpu, layer_ops, step_program
from hotsplit.runtime.step.program_summary import file_form, lines_of, summarise_program

CPU = torch.device("cpu")
POSITION = 3
# Hot neurons of each layer, dense blocks on a GPU, whether the head is on a GPU, and homes.
# Together the plans have every kind of layer and copy.
PLANS = {
    "host": None,
    "divided": ([SOME, SOME, SOME], [1, 1, 1], True, None),
    "every kind of layer": ([SOME, SOME, NONE], [1, 0, 0], False, None),
    "two GPUs": ([SOME, NONE, ALL], [1, 0, 1], True, [0, 0, 1, 1]),
    "keys on the host": ([SOME, NONE, ALL], [1, 0, 1], True, [0, 0, 1, 1]),
}
SELECTED = {"keys on the host": KeySelection(window=32)}
PRE_NORM = "attn_norm attention add ffn_norm predict neurons add"
# Operations of a layer on the host, norms by name, without those of biases.
ORDERS = {
    "llama": PRE_NORM,
    "llama with biases": PRE_NORM,
    "olmo2": "attention post_attention_norm add predict neurons post_ffw_norm add",
    "sandwich with biases": "attn_norm attention post_attention_norm add"
    " ffn_norm predict neurons add post_ffw_norm add",
    "qwen3": PRE_NORM,
    "opt": PRE_NORM,
    "opt, norms after": "attention add attn_norm predict neurons add ffn_norm",
    "falcon": "attn_norm attention add predict neurons add",
    "falcon, two norms": "attn_norm attn_norm_2 attention add predict neurons add",
    "falcon, one after the other": PRE_NORM,
}
REORDERED = ("llama with biases", "opt, norms after", "falcon, two norms", "sandwich with biases")


def files(tmp_path, family, plan, predictor_rank=8):
    """(a saved model, its saved plan or None)."""
    shape = make_sizes(num_layers=3, num_neurons=len(ALL))
    model = family_model(family, sizes=shape, predictor_rank=predictor_rank, input_layer_offset=1)
    model = dataclasses.replace(model, path=tmp_path / "m.gguf")
    model.save(model.path)
    if PLANS[plan] is None:
        return model, None
    hot, dense, head, home = PLANS[plan]
    options = {"home": home, "kv_offload": SELECTED.get(plan)}
    split = make_split(model, hot, dense_on_gpu=dense, head_on_gpu=head, **options)
    split.save(tmp_path / "s.gguf")
    return model, split


def replayed(tmp_path, family, plan):
    """A replay of one token after three others, and its logits in the order of the program."""
    model, split = files(tmp_path, family, plan)
    options = {} if split is None else {"split": tmp_path / "s.gguf"}
    with Engine.load(model.path, mode="predicted", **options) as engine:
        weights = engine._live.weights
        want = torch.stack([engine._step(token, i).clone() for i, token in enumerate(IDS[:4])])
        if PLANS[plan] is None:
            replay = Replay.of_host(weights)
        else:
            placement = Placement.of_split(split, (CPU,) * len(split.budgets))
            replay = Replay.of_plan(weights, placement)
        for position in range(POSITION + 1):
            take(replay.host, IDS[position], position)
            got = replay.logits(range(len(replay.operations)))
        bound = 0.0 if PLANS[plan] is None else 1e-5 * want[POSITION].abs().max()
        assert (got - want[POSITION]).abs().max() <= bound
        yield replay, got


@pytest.fixture
def loaded(tmp_path, request):
    yield from replayed(tmp_path, *request.param)


CASES = [(family, plan) for family in REORDERED for plan in PLANS]


@pytest.mark.parametrize("loaded", CASES, indirect=True)
def test_any_order_that_the_declared_edges_allow_gives_the_same_bits(loaded):
    replay, want = loaded
    orders = {tuple(replay.order(seed, replay.edges)) for seed in range(25)}
    for order in orders:
        assert torch.equal(replay.logits(order), want)
    assert len(orders) > 15 or "copy" not in {op.name for op in replay.operations}


@pytest.mark.parametrize("loaded", CASES, indirect=True)
def test_a_read_or_write_that_is_not_declared_is_found(loaded):
    """Each is left out in turn. One whose order follows from the other declarations cannot be
    found."""
    replay, want = loaded
    found, missed = Counter(), []
    for number, operation in enumerate(replay.operations):
        for is_read, values in ((True, operation.reads), (False, operation.writes)):
            for value in values:
                changes = replay.changes(number, value, want, is_read=is_read)
                found[changes] += 1
                if changes is False:
                    missed.append((number, operation.name, "read" if is_read else "write", value))
    print(found, missed)
    assert found[True] >= 20 and not missed


@pytest.mark.parametrize("loaded", [("llama", "divided")], indirect=True)
def test_the_replay_sees_a_value_that_nothing_writes(loaded):
    replay, want = loaded
    order = list(range(len(replay.operations)))
    for left_out in order[2:-2]:
        assert not torch.equal(replay.logits([n for n in order if n != left_out]), want)
    assert torch.equal(replay.logits(order), want)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_program_of_the_files_is_that_of_the_weights(tmp_path, family, plan):
    model, split = files(tmp_path, family, plan)
    options = {} if split is None else {"split": tmp_path / "s.gguf"}
    with Engine.load(model.path, mode="predicted", **options) as engine:
        weights = engine._live.weights
        if split is None:
            form = host_form(weights)
        else:
            placement = Placement.of_split(split, (CPU,) * len(split.budgets))
            form = placed_form(weights, placement)
    found = [
        dataclasses.replace(op, weight_bytes=0) for op in step_program(file_form(model, split))
    ]
    assert found == list(step_program(form))
    if split is None:
        names = [op.part if op.kind == "norm" else op.kind for op in found if op.layer == 1]
        assert [name for name in names if name != "bias"] == ORDERS[family].split()


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_each_device_are_the_bytes_that_plans_count(tmp_path, family, plan, rank):
    model, split = files(tmp_path, family, plan, rank)
    summary = summarise_program(model.path, None if split is None else tmp_path / "s.gguf")
    none = [NONE] * 3, [0] * 3, False, None
    hot, dense, head, home = PLANS[plan] or none
    gpus, host = plan_bytes(
        model,
        context_length=32,
        num_hot=[len(ids) for ids in hot],
        dense_on_gpu=dense,
        head_on_gpu=head,
        home=home or (),
        cache_types=None if split is None else split.cache_types(model),
    )
    items = ("attention", "predictor", "neurons", "head")
    want = {gpu(n): sum(each[item] for item in items) for n, each in enumerate(gpus)}
    rows = sum(
        entry.row_bytes for name, entry in model.tensors.items() if "_embd" in name
    )  # one row each of the embedding and the positions
    want = {HOST: sum(host[item] for item in items) + rows, **want}
    assert summary.weight_bytes == {device: count for device, count in want.items() if count}


def test_a_neuron_caches_bits_are_copied_once_per_gpu(tmp_path):
    """The copy follows the last layer that writes bits."""
    model, split = files(tmp_path, "llama", "divided", 0)
    form = file_form(model, split)
    with_bits = [
        dataclasses.replace(place, has_bits=index < 2, copies_bits=index == 1)
        for index, place in enumerate(form.places)
    ]
    ops = step_program(dataclasses.replace(form, places=tuple(with_bits)))
    writers = [op.layer for op in ops if "bits@gpu0" in op.writes]
    (copy,) = [op for op in ops if op.writes == ("bits@host",)]
    assert writers == [0, 1] and copy.layer == 1 and copy.home == "gpu0"


def test_many_equal_layers_are_one_run(tmp_path):
    shape = make_sizes(num_layers=30, num_neurons=len(ALL))
    model = family_model("llama", sizes=shape, path=tmp_path / "m.gguf")
    model.save(model.path)
    layers = [[SOME] * 12, [NONE] * 6, [SOME[:9]] * 12]
    split = make_split(model, [ids for run in layers for ids in run])
    split.save(tmp_path / "s.gguf")
    for path, labels in ((None, ["0-29"]), (tmp_path / "s.gguf", ["0-11", "12-17", "18-29"])):
        summary = summarise_program(model.path, path)
        lines = lines_of(summary)
        assert [line.layers for line in lines if line.layers] == labels and len(lines) < 30
        assert len(summary.operations) > 180
        again = lines[-1 if path is None else -4]
        assert path is None or again.operation == "as 0-11"
        counts = Counter(op.operation for op in summary.operations)
        assert counts["attention"] == 30 and counts["head"] == 1


def test_inspect_shows_the_program(tmp_path, capsys):
    model, _ = files(tmp_path, "falcon, two norms", "two GPUs")
    command = ["inspect", str(model.path), "--graph", "--split", str(tmp_path / "s.gguf")]
    assert main(command) == 0
    text = capsys.readouterr().out
    for word in ("norm attn_norm_2", "neurons hot", "host, beside", "x@gpu0"):
        assert word in text
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    summary = summarise_program(model.path, tmp_path / "s.gguf")
    assert found["kind"] == "step program" and found["weight_bytes"] == summary.weight_bytes
    assert len(found["operations"]) == len(summary.operations)
    assert found["operations"][0]["reads"] == ["token@host"]


def demo_program(folder, capsys):
    """The lines of `inspect --graph` for a model of the bundled one's size and the demo's plan."""
    sizes = {"num_layers": 6, "width": 256, "num_neurons": 1024, "vocab_size": 4096}
    shape = make_sizes(**sizes, num_heads=8, num_kv_heads=4, context_length=1024)
    model = make_model(sizes=shape, kind="f16", is_tied=True)
    gate = make_model(sizes=shape, kind="q4_0").tensors["blk.0.ffn_gate.weight"]  # of full rank
    layers = range(shape.num_layers)
    predictor = PredictorInfo(kind="linear", rank_L=(0,) * 6, threshold_L=(0.0,) * 6)
    tensors = model.tensors | {f"blk.{layer}.ffn_pred_up.weight": gate for layer in layers}
    model = dataclasses.replace(model, predictor=predictor, tensors=tensors)
    model.save(folder / "m.gguf")
    hot = [range(1024) if layer >= 3 else () for layer in layers]
    split = make_split(model, hot, dense_on_gpu=[layer >= 3 for layer in layers])
    split.save(folder / "s.gguf")
    command = ["inspect", folder / "m.gguf", "--graph", "--split", folder / "s.gguf"]
    assert main(list(map(str, command))) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_document_shows_what_inspect_prints(tmp_path, capsys):
    printed = iter(demo_program(tmp_path, capsys))
    text = (ROOT / "docs" / "architecture.md").read_text()
    (block,) = (block for block in text.split("```") if "norm attn_norm " in block)
    lines = [line.rstrip() for line in block.splitlines() if line.strip(" .")]
    shown = lines[next(i for i, line in enumerate(lines) if "device" in line) :]
    assert len(shown) >= 29
    assert [line for line in shown if line not in printed] == []  # in this order


def test_inspect_refuses_the_program_of_other_files(tmp_path, capsys):
    model, _ = files(tmp_path, "llama", "divided")
    (tmp_path / "text").write_text("no model")
    (tmp_path / "other").mkdir()
    other, _ = files(tmp_path / "other", "qwen3", "divided")
    plan = str(tmp_path / "s.gguf")
    for arguments in (
        [plan, "--graph"],
        [str(tmp_path / "text"), "--graph"],
        [str(tmp_path / "none"), "--graph"],
        [str(tmp_path), "--graph"],
        [str(other.path), "--graph", "--split", plan],
        [str(model.path), "--graph", "--split", str(model.path)],
        [str(model.path), "--split", plan],
    ):
        assert main(["inspect", *arguments]) in (1, 2)
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1, err


def test_edges_keep_reads_after_writes_and_writes_after_reads():
    reads_and_writes = [((), ("a",)), (("a",), ("b",)), (("a",), ("a",)), (("a", "b"), ())]
    assert edges(reads_and_writes) == [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]


DIVIDED = LayerPlace(device="gpu0", home="gpu0", blocks=(("hot", "gpu0"), ("cold", HOST)))


@pytest.mark.parametrize("options", [(), ("ffn_down.bias",)])
def test_divided_neurons_are_summed_before_a_norm_reads_them(options):
    layer = family_spec("sandwich", make_sizes(), options=options).layers[0]
    *before, total, norm, add = layer_ops(0, layer, DIVIDED)
    bias = ("bias@gpu0",) if options else ()
    assert total.reads == ("hot_out@gpu0", "cold_out@gpu0", *bias)
    assert total.writes == norm.reads == norm.writes == ("ffn_out@gpu0",)
    assert (norm.part, add.reads) == ("post_ffw_norm", ("x@gpu0", "ffn_out@gpu0"))
    assert [op.kind for op in before].count("add") == 1


def test_who_names_neurons_is_apart_from_how_they_are_computed():
    """A Predict block, and nothing else, makes the neurons read named ones."""
    layer = family_spec("llama", make_sizes()).layers[0]
    predict = Predict(kind="linear", rank=8, threshold=0.0)
    for spec, is_named in ((layer, False), (layer.with_predict(predict), True)):
        ops = list(layer_ops(0, spec, DIVIDED))
        readers = [op for op in ops if op.kind == "neurons"]
        assert len(readers) == 2
        assert all(any("named@" in value for value in op.reads) == is_named for op in readers)

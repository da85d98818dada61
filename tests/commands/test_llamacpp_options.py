"""Options of llama.cpp for a plan's budget: brute force over all matrices, the patterns that
llama.cpp would match, and the command."""

import json
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from models import (
    make_inputs,
    make_machine,
    make_model,
    make_sizes,
    mixture_spec,
    solver_files,
    take_workspace,
)
from test_solver_experts import profile_of, random_choices, save

from hotsplit.cli import main
from hotsplit.costs.part_bytes import head_bytes
from hotsplit.errors import HotsplitError
from hotsplit.model.spec import Route
from hotsplit.model.tensors import in_layout
from hotsplit.solver import llamacpp
from hotsplit.solver.layer_split import cpu_moe, kept_bytes, layer_split, on_gpu_seconds
from hotsplit.solver.llamacpp import ways
from hotsplit.solver.llamacpp_hosts import endpoints, several
from hotsplit.solver.llamacpp_speed import HAND_OVER_S
from hotsplit.solver.solve import SolveConfig, solve

ROUTE = Route(num_experts=8, num_used=2)


def inputs_of(
    share: float, *, cpu_gb_per_s: float = 5.0, num_layers: int = 3, num_dense: int = 0, **options
):
    """Inputs with a budget for the dense parts and this share of the experts; the first `num_dense`
    layers have none."""
    sizes = make_sizes(num_layers=num_layers, width=64, num_neurons=64, vocab_size=96)
    spec = mixture_spec(sizes, route=ROUTE, num_neurons=64, num_dense=num_dense)
    model = make_model(spec=spec, kind="q8_0")
    id_LTK = random_choices(np.random.default_rng(0), num_layers, 20, ROUTE, 1.0)
    id_LTK[:num_dense] = -1
    profile = profile_of(model, id_LTK)
    machine = make_machine(cpu_gb_per_s=cpu_gb_per_s, launch_s=1e-7, hand_over_s=2e-6, **options)
    inputs = make_inputs(model, profile, machine, 1, mode="dense")
    layers = range(num_layers)
    whole = sum(kept_bytes(inputs, n) for n in layers)
    less = sum(kept_bytes(inputs, n, has_experts=False) - kept_bytes(inputs, n) for n in layers)
    budget = inputs.workspace + head_bytes(model) + whole + int((1 - share) * less)
    return replace(inputs, budgets=(budget,))


def fastest(inputs) -> float:
    """Seconds of the best subset of all matrices of experts, by trying each."""
    matrices = [
        (layer, each)
        for layer in range(inputs.model.spec.num_layers)
        for each in llamacpp._matrices(inputs, layer)
    ]
    room = inputs.budgets[0] - inputs.workspace - head_bytes(inputs.model)
    layers = range(inputs.model.spec.num_layers)
    room -= sum(kept_bytes(inputs, n) for n in layers)
    best, base = np.inf, on_gpu_seconds(inputs)
    for bits in product([False, True], repeat=len(matrices)):
        cold = [found for found, is_cold in zip(matrices, bits, strict=True) if is_cold]
        if sum(each.num_bytes for _, each in cold) + room >= 0:
            waits = HAND_OVER_S * len({layer for layer, _ in cold})
            best = min(best, base + waits + sum(each.saved_s for _, each in cold))
    return best


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.75, 1.0])
def test_single_matrices_are_chosen_as_by_trying_all(share, monkeypatch):
    inputs = inputs_of(share)
    monkeypatch.setattr(llamacpp, "STEPS", 1 << 20)
    found = llamacpp._tensors(inputs)
    assert found is not None and found.seconds == pytest.approx(fastest(inputs))
    moe = cpu_moe(inputs)
    assert moe is not None and found.seconds <= moe[1] * (1 + 1e-9)
    if share in (0.0, 1.0):
        assert found.seconds == pytest.approx(moe[1])


def test_patterns_match_the_matrices_that_stay(monkeypatch):
    """llama.cpp searches them (std::regex_search) in the tensors of its layout."""
    inputs = inputs_of(0.5)
    found = llamacpp._tensors(inputs)
    assert found is not None and found.arguments[:2] == ("-ngl", "999")
    assert found.arguments[2] == "-ot" and len(found.arguments) == 4
    patterns = [p.removesuffix("=CPU") for p in found.arguments[3].split(",")]
    assert len(patterns) > 1
    tensors = {in_layout(n, "stock"): e for n, e in inputs.model.tensors.items()}
    cold = [n for n in tensors if any(re.search(p, n) for p in patterns)]
    assert cold and all("_exps" in name for name in cold)
    size = sum(tensors[name].num_bytes for name in cold)
    experts = sum(e.num_bytes for n, e in tensors.items() if "_exps" in n)
    assert 0.5 * experts <= size < 0.8 * experts  # a layer's matrices are 11 % each


def test_without_room_for_attention_whole_layers_remain():
    inputs = inputs_of(0.0)
    inputs = replace(inputs, budgets=(inputs.budgets[0] - 40_000,))
    (way,) = ways(inputs)
    assert way.arguments[0] == "-ngl" and 0 <= int(way.arguments[1]) <= 3
    assert cpu_moe(inputs) is None


def test_whole_layers_count_the_head_first():
    inputs = inputs_of(1.0)
    way = llamacpp._layers(inputs)
    assert way.arguments == ("-ngl", "4") and way.seconds == pytest.approx(on_gpu_seconds(inputs))
    assert way.seconds == pytest.approx(layer_split(inputs).seconds)


def test_layers_of_mtp_are_counted_after_the_head():
    inputs = inputs_of(1.0)
    model = replace(inputs.model, num_skipped=2)
    assert llamacpp._layers(replace(inputs, model=model)).arguments == ("-ngl", "6")
    assert llamacpp._layers(replace(inputs, model=model, budgets=(1,))).arguments == ("-ngl", "0")


def test_joined_gates_and_ups_move_together():
    """The file has ffn_gate_up_exps, of which the model's gates and ups are parts."""
    inputs = inputs_of(0.5)
    joined = {
        name: replace(entry, part_of=re.sub("_(gate|up)_", "_gate_up_", name))
        if re.search("_(gate|up)_exps", name)
        else entry
        for name, entry in inputs.model.tensors.items()
    }
    inputs = replace(inputs, model=replace(inputs.model, tensors=joined))
    sizes = {m.name: m.num_bytes for m in llamacpp._matrices(inputs, 0)}
    assert sizes.keys() == {"ffn_gate_up_exps", "ffn_down_exps"}
    assert sizes["ffn_gate_up_exps"] == 2 * sizes["ffn_down_exps"]
    found = llamacpp._tensors(inputs)
    assert found is not None
    patterns = [p.removesuffix("=CPU") for p in found.arguments[3].split(",")]
    assert any(re.search(p, f"blk.{n}.ffn_gate_up_exps.weight") for p in patterns for n in range(3))


def test_a_dense_models_matrices_move_too():
    model = make_model(sizes=make_sizes(num_layers=2, width=64, num_neurons=256), kind="q8_0")
    inputs = replace(inputs_of(0.5), model=model)
    whole = sum(kept_bytes(inputs, n) for n in range(2)) + head_bytes(model)
    found = llamacpp._tensors(replace(inputs, budgets=(inputs.workspace + whole - 1,)))
    assert found is not None
    (pattern,) = [each for each in found.arguments if each.endswith("=CPU")]
    assert re.fullmatch(r"blk\\\.\((0|1)\)\\\.\(ffn_(gate|up|down)\)\\\.=CPU", pattern), pattern


def of_gpus(shares, homes, **options):
    """Inputs with a GPU for each of these shares of the experts of its own layers."""
    inputs = inputs_of(1.0, num_gpus=len(shares), num_layers=len(homes) - 1, **options)
    budgets = []
    for gpu, share in enumerate(shares):
        own = [layer for layer, home in enumerate(homes[:-1]) if home == gpu]
        whole = sum(kept_bytes(inputs, n) for n in own)
        rest = sum(kept_bytes(inputs, n, has_experts=False) for n in own)
        head = head_bytes(inputs.model) * (homes[-1] == gpu)
        budgets.append(inputs.workspace + head + rest + int(share * (whole - rest)))
    return replace(inputs, budgets=tuple(budgets))


def placed_by_llamacpp(arguments, num_layers):
    """(the device of each layer and of the head, the layers whose experts are on the CPU), by the
    rule of llama.cpp's load_tensors: sums of -ts as f32, and the first above a layer's place."""
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    sums = np.cumsum(np.array(given["-ts"].split(","), np.float32))
    sums /= sums[-1]
    count = min(int(given["-ngl"]), num_layers + 1)
    places = np.arange(count, dtype=np.float32) / np.float32(count)
    on_cpu = re.compile(given["-ot"].removesuffix("=CPU")) if "-ot" in given else None
    names = [
        f"blk.{n}.ffn_{kind}_exps.weight" for n in range(num_layers) for kind in ("up", "down")
    ]
    cold = {int(name.split(".")[1]) for name in names if on_cpu and on_cpu.search(name)}
    return np.searchsorted(sums, places, side="right").tolist(), cold


@pytest.mark.parametrize("homes", [(0, 0, 0, 1, 1, 1, 1), (0, 1, 1, 1, 2, 2, 2), (0,) * 6 + (1,)])
@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0), (0.4, 0.7, 0.0), (0.0, 1.0, 0.5)])
def test_several_gpus_hold_what_the_options_put_there(homes, shares):
    shares = shares[: max(homes) + 1]
    inputs = of_gpus(shares, homes)
    hosts = ("10.0.0.2:50052", "10.0.0.3:50052")[: len(shares) - 1]
    experts = next(w for w in several(inputs, np.array(homes), hosts) if w.arguments[5] == "999")
    assert experts.arguments[:2] == ("--rpc", ",".join(hosts))
    assert experts.arguments[2:4] == (
        "--device",
        ",".join(["CUDA0", "RPC0", "RPC1"][: len(shares)]),
    )
    found, cold = placed_by_llamacpp(experts.arguments, len(homes) - 1)
    assert found == list(homes)
    for gpu, budget in enumerate(inputs.budgets):
        size = inputs.workspace + head_bytes(inputs.model) * (homes[-1] == gpu)
        own = [layer for layer, home in enumerate(homes[:-1]) if home == gpu]
        size += sum(kept_bytes(inputs, n, has_experts=n not in cold) for n in own)
        more = [kept_bytes(inputs, n) - kept_bytes(inputs, n, has_experts=False) for n in own]
        assert size <= budget and (not set(own) & cold or budget < size + min(more))
    assert (shares == (1.0,) * len(shares)) == (not cold)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_whole_layers_of_several_gpus_fit(share):
    """The head comes first, as in llama.cpp since 2025."""
    homes = (0, 0, 0, 1, 1, 1, 1)
    inputs = of_gpus((share, share), homes)
    way = next(w for w in several(inputs, np.array(homes)) if "999" not in w.arguments)
    found, cold = placed_by_llamacpp(way.arguments, 6)
    first = 6 - (len(found) - 1)
    assert not cold and found == sorted(found) and f"{6 - first} of 6 layers" in way.words
    for gpu, budget in enumerate(inputs.budgets):
        own = [kept_bytes(inputs, first + n) for n, home in enumerate(found[:-1]) if home == gpu]
        head = head_bytes(inputs.model) * (found[-1] == gpu)
        assert inputs.workspace + sum(own) + head <= budget
    assert first, "all would fit"


def test_hosts_are_checked():
    homes = np.array((0, 0, 0, 1))
    inputs = of_gpus((1.0, 1.0), homes)
    with pytest.raises(HotsplitError, match="3 hosts, but the plan is for 2 GPUs"):
        several(inputs, homes, endpoints("a:1,b:2,[::1]:3"))
    for text in ("a", "a:b", "a:1,,b:2", "a:1;rm", ""):
        with pytest.raises(HotsplitError, match="is no HOST:PORT"):
            endpoints(text)


def test_the_command_takes_a_plan_for_several_hosts(tmp_path, capsys):
    inputs = of_gpus((0.5, 0.5), (0, 0, 1, 1))
    save(tmp_path, inputs.model, inputs.profile, inputs.machine)
    config = SolveConfig(
        **solver_files(tmp_path), output=tmp_path / "plan", vram_budget_bytes=inputs.budgets
    )
    solve(config, take_workspace)
    given = ("--profile", str(tmp_path / "p"), "--machine", str(tmp_path / "c"))
    assert main(words(tmp_path, *given, "--rpc", "box:50052")) == 0
    shown = capsys.readouterr().out
    assert "--rpc box:50052 --device CUDA0,RPC0 -ngl" in shown and " -ts " in shown
    assert main(words(tmp_path, *given)) == 0
    assert "--rpc" not in capsys.readouterr().out


@pytest.fixture
def files(tmp_path):
    inputs = inputs_of(0.5)
    save(tmp_path, inputs.model, inputs.profile, inputs.machine)
    config = SolveConfig(
        **solver_files(tmp_path), output=tmp_path / "plan", vram_budget_bytes=inputs.budgets[0]
    )
    return tmp_path, solve(config, take_workspace)


def words(folder, *more: str) -> list[str]:
    return ["export", str(folder / "m.gguf"), "--llama-cpp", "--split", str(folder / "plan"), *more]


def test_the_command_prints_options_and_both_speeds(files, capsys):
    folder, report = files
    given = ("--profile", str(folder / "p"), "--machine", str(folder / "c"))
    assert main(words(folder, *given)) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("-c ") and shown.out.count("\n") == 1 and "-ngl" in shown.out
    assert f"{report.tokens_per_s:,.1f} tokens/s predicted" in shown.err
    assert main(words(folder, *given, "--json")) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["plan_s"] == report.objective_s
    assert content["llama_cpp"][0]["seconds"] >= report.objective_s


def test_the_plans_rope_scaling_is_taken_and_printed(tmp_path, capsys):
    inputs = inputs_of(0.5)
    save(tmp_path, inputs.model, inputs.profile, inputs.machine)
    longer = 2 * inputs.model.spec.context_length
    given = {
        **solver_files(tmp_path),
        "output": tmp_path / "plan",
        "rope_scaling": "yarn",
        "vram_budget_bytes": inputs.budgets[0],
        "context_length": longer,
    }
    solve(SolveConfig(**given), take_workspace)
    files = ("--profile", str(tmp_path / "p"), "--machine", str(tmp_path / "c"))
    assert main(words(tmp_path, *files)) == 1
    assert "--rope-scaling yarn extends it" in capsys.readouterr().err
    assert main(words(tmp_path, *files, "--rope-scaling", "yarn")) == 0
    begin = f"-c {longer} --rope-scaling yarn --rope-scale 2 --yarn-orig-ctx {longer // 2} -ngl"
    assert capsys.readouterr().out.startswith(begin)


@pytest.mark.parametrize(
    ("more", "words_"),
    [
        (["--profile", "p"], "--llama-cpp needs --machine"),
        (["--profile", "p", "--machine", "c", "--format", "gpuidx"], "--format is not for"),
    ],
)
def test_what_is_missing_is_said(files, capsys, more, words_):
    folder, _ = files
    given = [str(folder / each) if each in ("p", "c") else each for each in more]
    assert main(words(folder, *given)) == 2
    assert words_ in capsys.readouterr().err

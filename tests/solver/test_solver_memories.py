"""Memories that are too small are refused before a search, and only those. The sizes and contexts
that refusals name work; one byte less, or one token of context more, is refused."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from brute_force import brute_force, random_inputs
from models import make_machine, save_solver_files

from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode
from hotsplit.solver import optimise
from hotsplit.solver.fullest import emptiest, fullest, fullest_plan, least_room
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.memories import TooSmallError, least_of
from hotsplit.solver.mode_choice import find
from hotsplit.solver.multi_gpu import bytes_of_gpus
from hotsplit.solver.problem import Problem, held_bytes, is_feasible


def random_run(rng: np.random.Generator) -> Problem:
    """A run of 0 to 3 layers of 1 to 5 neurons; sizes are equal, nearly equal, or different."""
    num_layers, num_neurons = int(rng.integers(0, 4)), int(rng.integers(1, 6))
    unit = int(rng.choice([1, 1, 32]))
    sizes = rng.integers(1, 9, num_layers) if rng.random() < 0.5 else np.full(num_layers, 7)
    touched_LF = -np.sort(-rng.random((num_layers, num_neurons)), axis=1)
    return Problem(
        order_LF=np.tile(np.arange(num_neurons, dtype=np.int32), (num_layers, 1)),
        touched_LF=touched_LF,
        neuron_bytes_L=(sizes * unit).astype(np.int64),
        min_hot_L=rng.integers(1, num_neurons + 1, num_layers),
        dense_bytes_L=rng.choice([11, 12, int(rng.integers(0, 40))], num_layers) * unit,
        dense_gpu_s_L=rng.random(num_layers),
        dense_cpu_s_L=rng.random(num_layers),
        head_bytes=int(rng.choice([0, 10, 33])) * unit,
        head_gpu_s=1.0,
        head_cpu_s=2.0,
        workspace_bytes=5,
        budget_bytes=int(rng.integers(0, 150)) * unit,
        gpu_s_per_byte=0.1,
        hot_s_per_byte_L=np.full(num_layers, 0.1),
        cpu_s_per_byte_L=rng.random(num_layers),
        kernels_s=0.1,
        hand_over_s=0.1,
        cpu_run_s=0.1,
        use_s=0.1,
    )


def all_sums(run: Problem) -> set[int]:
    choices = [{0, run.head_bytes}]
    for layer in range(run.num_layers):
        counts = [0, *range(int(run.min_hot_L[layer]), run.num_neurons + 1)]
        choices.append({n * int(run.neuron_bytes_L[layer]) for n in counts})
        choices.append({0, int(run.dense_bytes_L[layer])})
    return {sum(one) for one in product(*choices)}


@pytest.mark.parametrize("seed", range(150))
def test_fullest_and_emptiest_agree_with_all_sums(seed):
    rng = np.random.default_rng(seed)
    run = random_run(rng)
    sums = all_sums(run)
    for limit in rng.integers(0, max(sums) + 9, 12).tolist():
        full, few = fullest(run, limit), emptiest(run, limit)
        assert held_bytes(run, full) == max(s for s in sums if s <= limit)
        assert is_feasible(replace(run, budget_bytes=limit + run.workspace_bytes), full)
        enough = [s for s in sums if s >= limit]
        assert (few is None) == (not enough)
        if few is not None:
            assert held_bytes(run, few) == min(enough)
            assert ((few.num_hot_L == 0) | (few.num_hot_L >= run.min_hot_L)).all()


def test_sums_of_a_model_of_many_sizes_are_found_at_once():
    """80 layers whose dense blocks all differ in size, as with predictors of many ranks."""
    rng = np.random.default_rng(0)
    num_layers, num_neurons = 80, 8192
    run = random_run(np.random.default_rng(1))
    run = replace(
        run,
        order_LF=np.zeros((num_layers, num_neurons), np.int32),
        touched_LF=np.ones((num_layers, num_neurons)),
        neuron_bytes_L=rng.choice([13_824, 16_128], num_layers),
        min_hot_L=rng.integers(100, 900, num_layers),
        dense_bytes_L=rng.integers(1 << 18, 1 << 20, num_layers) * 128,
        head_bytes=128 << 20,
    )
    room = 12 << 30
    full = held_bytes(run, fullest(run, room))
    few = emptiest(run, room)
    assert few is not None
    assert room - 256 < full <= room <= held_bytes(run, few) < room + 256


def refusal_of(inputs: Inputs) -> TooSmallError | None:
    try:
        find(inputs, time_limit_s=5)
    except TooSmallError as error:
        return error
    return None


def refused_inputs(seed: int, mode: Mode | None = None) -> Inputs:
    """A problem whose memories are reduced until there is no plan."""
    rng = np.random.default_rng(seed)
    mode = mode or ("exact", "dense")[int(rng.integers(2))]
    inputs = random_inputs(int(rng.integers(0, 10_000)), int(rng.integers(1, 3)), mode)
    while True:
        pipeline = inputs.pipeline()
        if refusal_of(inputs):
            return inputs
        kind = rng.random()
        if kind < 0.5:
            held = int(rng.uniform(0.3, 1) * inputs.host_budget)
            inputs = replace(inputs, host_budget=held)
        elif kind < 0.8:
            budgets = tuple(int(rng.uniform(0, 1) * budget) for budget in inputs.budgets)
            inputs = replace(inputs, budgets=budgets)
        else:
            gpu = int(rng.integers(0, len(inputs.budgets)))
            least = pipeline.problems[gpu].minimum_bytes
            budgets = list(inputs.budgets)
            budgets[gpu] = int(rng.choice([0, 1, least - 1, least, least + 1]))
            inputs = replace(inputs, budgets=tuple(budgets))


@pytest.mark.parametrize("seed", range(15))
def test_a_refusal_is_right_by_brute_force(seed):
    """Tries every placement of layers and every set of neurons to see whether there is a plan."""
    inputs = refused_inputs(seed, "exact")
    pipeline = inputs.pipeline()
    is_usable = all(not 0 < p.budget_bytes < p.minimum_bytes for p in pipeline.problems)
    if is_usable:
        assert (refusal_of(inputs) is not None) == np.isinf(brute_force(inputs))
    error = refusal_of(inputs)
    if error is not None and error.smallest.host is not None and not error.smallest.together:
        host = error.smallest.host
        assert np.isfinite(brute_force(replace(inputs, host_budget=host)))
        assert np.isinf(brute_force(replace(inputs, host_budget=host - 1)))


def test_a_refusal_comes_before_the_search(monkeypatch):
    """Asks for one byte more than all GPUs together can hold, without a search: for a 7B shape, a
    search that finds no plan takes 90 s."""
    monkeypatch.setattr(optimise, "_start", lambda pipeline: pytest.fail("searched"))
    inputs = random_inputs(4, 2, "exact")
    pipeline = replace(inputs.pipeline(), need_bytes=1)
    most = sum(bytes_of_gpus(pipeline, fullest_plan(pipeline)))
    assert most > 0
    assert optimise.find_plan(replace(pipeline, need_bytes=most + 1), time_limit_s=30) is None
    with pytest.raises(pytest.fail.Exception, match="searched"):
        optimise.find_plan(replace(pipeline, need_bytes=most), time_limit_s=30)


def test_gpu_memory_does_not_replace_what_is_always_in_main_memory():
    inputs = replace(random_inputs(3, 1, "exact"), host_budget=10)
    assert least_room(inputs.pipeline(), 0) is None
    error = refusal_of(inputs)
    assert error is not None and error.smallest.budgets is None
    assert "of GPU memory, or" not in str(error)
    roomy = replace(inputs, budgets=(1 << 30,))
    assert refusal_of(roomy) is not None
    # Nor does main memory make a GPU of one byte hold anything: both are named.
    both = refusal_of(replace(inputs, budgets=(1,)))
    assert both is not None and both.smallest.together and " and " in str(both)


def test_the_smallest_memory_of_several_modes_is_named():
    errors = []
    for mode in ("exact", "dense"):
        inputs = replace(refused_inputs(5, mode), host_budget=1)
        error = refusal_of(inputs)
        assert error is not None
        errors.append(error)
    found = least_of(errors)
    hosts = [error.smallest.host for error in errors]
    assert found.smallest.host == min(host for host in hosts if host is not None)
    assert isinstance(found, HotsplitError)


NUMBER = r"([\d,]+)"
SIZE = rf"[\d,.]+ MiB \({NUMBER} bytes\)"
FOR_GPU = rf"the smallest that (?:works|does) is {SIZE}"
FOR_HOST = rf"--ram that (?:works|holds one) is {SIZE}"
FOR_BOTH = (
    rf"the smallest that works is (.* of GPU memory)?(, or | and )?(?:{SIZE} of main memory)?"
)
FOR_CONTEXT = rf"a --context of {NUMBER} fits"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    one, two = (make_machine(cpu_gb_per_s=0.005, gpu_gb_per_s=0.5, num_gpus=n) for n in (1, 2))
    return save_solver_files(tmp_path_factory.mktemp("named"), c1=one, c2=two)


def typed(num_bytes: int, unit: str) -> str:
    """The size in a unit, rounded to a millionth of it."""
    shift = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30}[unit]
    return f"{num_bytes / (1 << shift):.6f}{unit}" if shift else f"{num_bytes}B"


class Command:
    """Random options of `hotsplit solve`."""

    def __init__(self, rng: np.random.Generator, folder) -> None:
        self.folder = folder
        self.num_gpus = int(rng.integers(1, 3))
        unit = str(rng.choice(["B", "KiB", "MiB", "GiB"]))
        sizes = rng.choice([0, 1, 20_000, 300_000, 700_000, 1_500_000], self.num_gpus)
        self.budgets = [typed(int(size), unit) for size in sizes]
        self.host = typed(int(rng.choice([1, 30_000, 200_000, 500_000, 900_000])), unit)
        self.mode = str(rng.choice(["dense", "exact", "predicted", "fastest"]))
        self.context = str(int(rng.choice([1, 16, 33, 64])))
        self.more = ["--sequences", str(int(rng.integers(1, 4)))]
        if self.mode != "dense" and rng.random() < 0.3 and self.num_gpus == 1:
            self.more += ["--neuron-cache", f"most_rows={int(rng.integers(1, 9))}"]
        if rng.random() < 0.3:
            self.more += ["--kv-offload=window=16,top=8"]

    def line(self, capsys, **other) -> str | None:
        """Runs the command with some options changed; returns its refusal. None if there is a plan,
        or if the best plan leaves a neuron cache nothing to swap: more memory would not help."""
        now = vars(self) | other
        mode = "" if self.mode == "fastest" else f"--mode {self.mode}"
        here, budgets = self.folder, " ".join(f"-vb {size}" for size in now["budgets"])
        words = (
            f"solve {here}/m.gguf --profile {here}/p --machine {here}/c{self.num_gpus}"
            f" -o {here}/plan --force --ram {now['host']} {mode}"
            f" -c {now['context']} {' '.join(self.more)} {budgets}"
        )
        capsys.readouterr()
        if main(words.split()) == 0:
            return None
        line = capsys.readouterr().err.splitlines()[-1]
        return None if "nothing to swap" in line else line


def number(text: str) -> int:
    return int(text.replace(",", ""))


def check(command: Command, capsys) -> int:
    """Tries every size and context that a refusal names; returns their number."""
    line = command.line(capsys)
    if line is None or "smallest" not in line:
        return 0
    named = 0
    both = re.search(FOR_BOTH, line) if "main memory" in line and " of GPU memory" in line else None
    if found := re.search(FOR_HOST, line):
        named += _host(command, capsys, number(found[1]), line, command.budgets)
    elif both and (both[1] or both[3]):
        budgets = command.budgets
        if both[1]:
            named += _budgets(command, capsys, both, line)
            if both[2] == " and ":
                parts = both[1].removesuffix(" of GPU memory").split(" + ")
                budgets = [f"{number(re.match(SIZE, part)[1])}B" for part in parts]  # type: ignore[index]
        if both[3]:
            named += _host(command, capsys, number(both[3]), line, budgets)
    elif found := re.search(FOR_GPU, line):
        size = number(found[1])
        named += 1
        enough = command.line(capsys, budgets=[f"{size}B"])
        # A cache may need more main memory, too; this line is about the GPU alone.
        assert enough is None or ("neuron cache" in line and "of main memory" in enough), line
        less = command.line(capsys, budgets=[f"{size - 1}B"])
        assert less is not None and "holds nothing" in less, line
    if found := re.search(FOR_CONTEXT, line):
        named += 1
        assert command.line(capsys, context=found[1].replace(",", "")) is None, line
        assert command.line(capsys, context=str(number(found[1]) + 1)), line
    assert named, line
    return named


def _host(command: Command, capsys, size: int, line: str, budgets: list[str]) -> int:
    assert command.line(capsys, host=f"{size}B", budgets=budgets) is None, line
    assert command.line(capsys, host=f"{size - 1}B", budgets=budgets), line
    return 1


def _budgets(command: Command, capsys, both: re.Match[str], line: str) -> int:
    """Tries the budgets; one byte less is refused for each that is not marked "as given"."""
    parts = both[1].removesuffix(" of GPU memory").split(" + ")
    sizes = [number(re.match(SIZE, part)[1]) for part in parts]  # type: ignore[index]
    host = f"{number(both[3])}B" if both[2] == " and " else command.host
    assert command.line(capsys, budgets=[f"{size}B" for size in sizes], host=host) is None, line
    named = 0
    for gpu, part in enumerate(parts):
        if "as given" in part:
            continue
        named += 1
        less = [f"{size - (gpu == other)}B" for other, size in enumerate(sizes)]
        assert command.line(capsys, budgets=less, host=host), line
    assert named, line
    return named


@pytest.mark.parametrize("seed", range(4))
def test_what_a_refusal_of_typed_sizes_names_is_least(seed, folder, capsys):
    rng = np.random.default_rng(seed)
    assert sum(check(Command(rng, folder), capsys) for _ in range(20)) >= 3


def test_a_budget_that_is_not_least_is_marked_as_given(folder, capsys):
    command = Command(np.random.default_rng(0), folder)
    command.num_gpus, command.mode, command.more = 2, "exact", []
    command.budgets, command.host, command.context = ["300001B", "1B"], "200000B", "16"
    line = command.line(capsys)
    assert line is not None and "is 0.29 MiB (300,001 bytes) as given + " in line, line
    assert check(command, capsys)

"""Memories and contexts that `hotsplit solve` names when it refuses sizes as users type them.
Each works; one byte less, or one token of context more, is refused."""

import re

import numpy as np
import pytest
from models import make_machine, save_solver_files

from hotsplit.cli import main

NUMBER = r"([\d,]+)"
SIZE = rf"[\d,.]+ MiB \({NUMBER} bytes\)"
FOR_GPU = rf"the smallest that (?:works|does) is {SIZE}"
FOR_HOST = rf"--host-budget that (?:works|holds one) is {SIZE}"
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
            f" -o {here}/plan --force --host-budget {now['host']} {mode}"
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

"""Plans for several sequences: the bytes of their cache, the file, and engines and commands that
use them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from models import byte_level_keys, make_model, make_sizes, save_solver_files, solver_files
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import SPLIT_ARCHITECTURE
from hotsplit.artifacts.split_file import Split
from hotsplit.cli import main
from hotsplit.commands.serve import _places_of, _say_loaded
from hotsplit.costs.cache_layout import kv_positions
from hotsplit.costs.part_bytes import kv_bytes
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import read_gguf, write_gguf
from hotsplit.serve.serve_config import ServeConfig
from hotsplit.solver.solve import SolveConfig, check, solve

CONTEXT, WORKSPACE = 100, 100 << 10


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    shape = make_sizes(num_layers=3, context_length=128)
    model = make_model(sizes=shape, kind="f16", predictor_rank=8)
    return save_solver_files(tmp_path_factory.mktemp("sequences"), model)


def config(files, output, **changes) -> SolveConfig:
    values = solver_files(files) | {
        "force": True,
        "vram_budget_bytes": WORKSPACE + (400 << 10),
        "mode": "exact",
        "output": output,
        "context_length": CONTEXT,
    }
    return SolveConfig(**values | changes)


def command(files, folder, options: str) -> list[str]:
    line = (
        f"solve {files}/m.gguf --profile {files}/p --machine {files}/c -o {folder}/plan {options}"
    )
    return line.split()


def solved(files, output, **changes):
    return solve(config(files, output, **changes), lambda *given: WORKSPACE)


def small_plan(folder, num_sequences, **options):
    """Saves a model and a hand-made plan, which divides layer 0 and leaves the others on the CPU;
    returns their paths."""
    path = folder / "m.gguf"
    keys, num_tokens = byte_level_keys()
    shape = make_sizes(num_layers=3, context_length=128, vocab_size=num_tokens)
    model = replace(make_model(sizes=shape, kind="f16", extra_keys=keys), path=path)
    model.save(path)
    num_layers, neurons = model.spec.num_layers, np.arange(model.spec.most_neurons)
    hot = [neurons[::3], *[neurons[:0]] * (num_layers - 1)]
    split = make_split(
        model,
        hot,
        dense_on_gpu=[1] + [0] * (num_layers - 1),
        context_length=CONTEXT,
        num_sequences=num_sequences,
        **options,
    )
    split.save(folder / "s.gguf")
    return path, folder / "s.gguf"


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_budget_includes_the_cache_of_all_sequences_to_the_byte(files, tmp_path, count):
    report = solved(files, tmp_path / "plan", num_sequences=count)
    split, model = Split.load(tmp_path / "plan"), ModelFile.load(files / "m.gguf")
    positions = CONTEXT if count == 1 else count * 128  # two blocks of 64 per sequence
    assert kv_positions(CONTEXT, count) == positions
    wanted = 3 * kv_bytes(model, 0, positions)
    assert split.gpu_bytes["kv_cache"] + split.cpu_bytes["kv_cache"] == wanted
    assert split.num_sequences == report.num_sequences == count
    assert sum(split.gpu_bytes.values()) <= split.vram_budget_bytes
    assert check(config(files, tmp_path / "plan")).num_sequences == count
    with Engine.load(files / "m.gguf", tmp_path / "plan", device="cpu") as engine:
        caches = [layer.attention.cache for layer in engine.layers]
        held = sum(c.key_BKPX.nbytes + c.value_BKPX.nbytes for c in caches)
        assert held == wanted == sum(items["kv_cache"] for items in engine.bytes_by_role.values())
        assert caches[0].table.num_sequences == count


@pytest.mark.parametrize("wrong", [0, -1])
def test_an_impossible_number_of_sequences_is_refused(files, tmp_path, wrong):
    solved(files, tmp_path / "plan", num_sequences=3)
    keys, tensors = read_gguf(tmp_path / "plan", "plan")
    keys = {k: v for k, v in keys.items() if k.startswith("hotsplit.")}
    keys["hotsplit.split.num_sequences"] = np.int32(wrong)
    write_gguf(tmp_path / "other", SPLIT_ARCHITECTURE, keys, tensors)
    with pytest.raises(HotsplitError, match="num_sequences"):
        Split.load(tmp_path / "other")


def test_cache_bytes_for_another_number_of_sequences_are_refused(files, tmp_path):
    solved(files, tmp_path / "plan", num_sequences=3)
    split, model = Split.load(tmp_path / "plan"), ModelFile.load(files / "m.gguf")
    wrong = replace(split, num_sequences=2)
    with pytest.raises(HotsplitError, match="kv_cache of .* takes"):
        wrong.check_against(model, tmp_path / "plan")


@pytest.mark.parametrize("count", [0, 1025])
def test_the_command_checks_the_number_of_sequences(files, tmp_path, capsys, count):
    arguments = command(files, tmp_path, f"-vb 500KiB --sequences {count}")
    assert main(arguments) == 1
    assert "wanted 1 to 1024" in capsys.readouterr().err


def test_more_sequences_than_the_plan_has_are_refused_with_advice(tmp_path):
    path, plan = small_plan(tmp_path, 2)
    with pytest.raises(
        HotsplitError, match="plan's cache is for 2; run hotsplit solve with --sequences 3"
    ):
        Engine.load(path, plan, device="cpu", num_sequences=3)
    with Engine.load(path, plan, device="cpu") as engine:
        texts = [engine.sequence(), engine.sequence()]
        with pytest.raises(HotsplitError, match="all 2 sequences"):
            engine.sequence()
        assert texts[0].length == 0


@pytest.mark.parametrize(
    ("given", "parallel", "kept", "found"),
    [
        ((), 1, None, (3, 3)),
        ((), 1, 0, (6, 0)),
        ((), 1, 5, (1, 5)),
        (("parallel",), 2, None, (2, 4)),
        (("parallel",), 6, None, (6, 0)),
    ],
)
def test_a_server_takes_its_places_from_the_plan(tmp_path, given, parallel, kept, found):
    _, plan = small_plan(tmp_path, 6)
    with asked(given):
        assert _places_of(plan, 6, parallel, kept) == found


@pytest.mark.parametrize(("parallel", "kept", "wanted"), [(7, None, 7), (6, 1, 7)])
def test_a_server_refuses_more_places_than_a_plan_has(tmp_path, parallel, kept, wanted):
    _, plan = small_plan(tmp_path, 6)
    with asked(("parallel",)), pytest.raises(HotsplitError, match=f"--sequences {wanted}$"):
        _places_of(plan, 6, parallel, kept)


@pytest.mark.parametrize(("plan_places", "is_said"), [(1, True), (6, False), (None, False)])
def test_a_server_advises_more_sequences_only_for_a_plan_of_one(
    tmp_path, capsys, plan_places, is_said
):
    """One text at a time is also what --parallel 1 --kept 0 asks for."""
    path, plan = small_plan(tmp_path, plan_places or 1)
    config = ServeConfig(model=path, parallel=1, kept=0)
    with Engine.load(path, plan, device="cpu", num_sequences=1) as engine:
        _say_loaded(engine, config, plan_places)
    said = capsys.readouterr().err
    assert "1 texts of" in said
    assert ("hotsplit solve with --sequences" in said) == is_said


def asked(names):
    """The context of a command to which these options were given."""
    import click

    context = click.Context(click.Command("serve"))
    for name in ("parallel", "kept"):
        source = "COMMANDLINE" if name in names else "DEFAULT"
        context.set_parameter_source(name, click.core.ParameterSource[source])
    return context


def test_generate_writes_several_prompts_with_a_plan(tmp_path, capsys):
    path, plan = small_plan(tmp_path, 3)
    (tmp_path / "prompts").write_text("abc\nde\nabcd\n")
    files = f"{path} --split {plan} --prompts {tmp_path}/prompts"
    arguments = f"generate {files} -n 6 --device cpu --temp 0 --json".split()
    assert main(arguments) == 0
    many = json.loads(capsys.readouterr().out)["texts"]
    with Engine.load(path, plan, device="cpu") as engine:
        for prompt, found in zip(("abc", "de", "abcd"), many, strict=True):
            alone = engine.generate(prompt, max_tokens=6, temperature=0.0)
            assert found["text"] == "".join(token.text for token in alone)
    (tmp_path / "prompts").write_text("a\nb\nc\nd\n")
    assert main(arguments) == 1
    assert "run hotsplit solve with --sequences 4" in capsys.readouterr().err

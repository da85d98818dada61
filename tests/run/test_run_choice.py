"""The choices of `hotsplit run`, its estimates of time, and its bundled text; options that are
refused before anything is made, and those that are accepted."""

from runpy import run_path

import pytest
from case_tables import rows_of
from checkpoints import random_dejavu
from models import make_model, make_sizes, mixture_spec
from paths import ROOT
from run_fixtures import MIB
from test_experts import mixture
from test_gguf_source import powerinfer_file

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.cli import main
from hotsplit.commands.options.command_options import take_engine_options
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.model.weight_types import BY_QUALITY
from hotsplit.run import choice, estimate, prepare, stages
from hotsplit.run.cache_folder import RunCache
from hotsplit.run.choice import Wishes, choose, choose_predictors, choose_type, worth
from hotsplit.run.default_budgets import GPU_SHARE, STEP_BYTES, Room, room_here
from hotsplit.run.housekeeping import list_cache
from hotsplit.run.source import look_at
from hotsplit.system.sizes import format_bytes

pytest_plugins = ("run_fixtures",)
pytestmark = pytest.mark.usefixtures("cache")

# ---- choices ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(silu, tmp_path_factory):
    return look_at(silu, None, tmp_path_factory.mktemp("s") / "none.gguf")


def size(source, kind) -> int:
    return choice.run_bytes(source.draft(kind), 128)


def test_the_type_is_the_most_precise_that_fits(source):
    """Rows of 64 values do not fill a K-quant's block and have llama.cpp's smaller ones: q8_0 for
    q6_k, q5_1 for q5_k, q5_0 for q4_k; and q8_0 for the head of q4_0, which is not the smallest
    here."""
    least = min(BY_QUALITY, key=lambda kind: size(source, kind))
    for room, kind in (
        (Room(main=size(source, "q8_0")), "q8_0"),
        (Room(main=size(source, "q8_0") - 1), "q5_k"),
        (Room(main=size(source, "q8_0") - MIB, gpus=(MIB,)), "q8_0"),
        (Room(main=1 << 40, gpus=(size(source, least),)), least),  # whole on the GPU
        (Room(main=1 << 40, gpus=(size(source, least) - 1,)), "q8_0"),
    ):
        assert choose_type(source, Wishes(), room)[0] == kind, room
    kind, line = choose_type(source, Wishes(), Room(main=1000))
    assert kind == least and "more than the 1000 B of memory" in line
    assert choose_type(source, Wishes(outtype="f16"), Room(main=0))[0] == "f16"


def test_a_file_in_llamacpps_layout_keeps_its_type(silu, tmp_path):
    stock = tmp_path / "stock.gguf"
    convert(ConvertConfig(source=silu, output=stock, outtype="q8_0", layout="stock"))
    given = look_at(stock, None, tmp_path / "none.gguf")
    assert given.own is None
    kind, line = choose_type(given, Wishes(), Room(main=1 << 40))
    assert kind is None and line.startswith("type q8_0: the file's own (")
    kind, line = choose_type(given, Wishes(), Room(main=1000, gpus=(MIB,)))  # rounded twice by none
    assert kind is None and line.startswith("type q8_0: the file's own; its ")
    assert "of both memories that a model should take" in line and "--outtype q4_0" in line
    _, line = choose_type(given, Wishes(), Room(main=1000))
    assert "read from the disk" in line


def wishes_of(**options):
    engine = take_engine_options(options)
    return Wishes(engine=engine, **options)


def test_a_plan_is_made_only_where_one_is_needed(source):
    fits = size(source, "q8_0")
    for gpus, budgets, device in (
        ((), (), "cpu"),
        ((fits,), (), None),
        ((fits - 1,), (fits - 1,), None),
        ((MIB,), (), "cpu"),
    ):
        found = choose(source, Wishes(outtype="q8_0"), Room(main=1 << 40, gpus=gpus))
        assert (found.budgets, found.device) == (budgets, device), gpus
    # With too little of a GPU, type and layout are those for the CPU, too.
    on_cpu = choose(source, Wishes(), Room(main=1 << 40))
    too_little = choose(source, Wishes(vram=(MIB,)), Room(main=1 << 40, gpus=(MIB,)))
    assert (too_little.model, too_little.layout) == (on_cpu.model, on_cpu.layout)
    assert too_little.types == on_cpu.types and "--vram is too little" in too_little.lines[-1]
    less = choice.run_bytes(source.draft("q8_0"), 32) - 1
    short = wishes_of(outtype="q8_0", context_length=32, vram=(less,))
    found = choose(source, short, Room(main=1 << 40, gpus=(less,)))
    assert (found.budgets, found.device) == ((less,), None)
    assert f"a plan for {format_bytes(less)} of VRAM" in found.lines[-2]
    assert found.lines[-1].startswith("it fits but for 1%: use llama.cpp")


@pytest.mark.parametrize(
    "wishes, has_cuda, why",
    [
        ({}, False, "torch sees no GPU here"),
        ({"device": "cpu"}, True, "--device cpu"),
        ({"vram": (0,)}, True, "--vram 0"),
        ({"vram": (MIB,)}, False, "torch sees no GPU here, so --vram has no effect"),
        ({"vram": (MIB,)}, True, "--vram is too little"),
        ({}, True, "the GPU's free memory is too little"),
    ],
)
def test_it_says_why_no_gpu_is_used(source, monkeypatch, wishes, has_cuda, why):
    monkeypatch.setattr(choice.torch.cuda, "is_available", lambda: has_cuda)
    found = choose(source, wishes_of(outtype="q8_0", **wishes), Room(main=1 << 40))
    assert found.lines[-1].startswith(f"on the CPU, without a plan: {why}")


def test_the_default_budget_is_that_of_the_gpu_asked_for(monkeypatch):
    free = {0: 8 << 30, 1: 4 << 30}
    monkeypatch.setattr(choice.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        choice.torch.cuda, "mem_get_info", lambda device: (free[device.index], 8 << 30)
    )
    for device, index in ((None, 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)):
        (budget,) = room_here(None, device).gpus
        wanted = GPU_SHARE * free[index]
        assert wanted - STEP_BYTES < budget <= wanted, device
    assert room_here(None, "cpu").gpus == ()


def test_a_budget_above_what_is_free_is_lowered_and_said(source, monkeypatch):
    free = [8 << 30, 4 << 30]
    cuda = choice.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (free[device.index], 12 << 30))
    assert room_here((8 << 30,), None).gpus == (8 << 30,) and not room_here((1,), None).lines
    low = room_here((12 << 30,), None)
    assert low.gpus == room_here(None, None).gpus
    (line,) = low.lines
    assert line == "--vram 12.00 GiB: only 8.00 GiB are free on the GPU, so 7.00 GiB are used"
    both = room_here((8 << 30, 5 << 30), None)
    assert both.gpus == (8 << 30, room_here(None, "cuda:1").gpus[0])
    assert "on the GPU 1, so 3.50 GiB" in both.lines[0] and len(both.lines) == 1
    assert room_here((5 << 30,), "cuda:1").gpus == room_here(None, "cuda:1").gpus
    assert line in choose(source, wishes_of(outtype="q8_0"), low).lines
    with pytest.raises(HotsplitError, match=r"--vram: 4.00 GiB, 0 B; 0 is for the CPU alone"):
        room_here((4 << 30, 0), None)


def test_which_models_are_looked_at():
    cases = (
        ("silu", Wishes(), False, False),
        ("relu", Wishes(), False, None),
        ("relu", Wishes(), True, False),
        ("relu", wishes_of(mode="exact"), False, False),
        ("relu", wishes_of(mode="predicted"), True, True),
    )
    for activation, wishes, is_on_gpu, wanted in cases:
        model = make_model(activation=activation)
        found, line = choose_predictors(model, wishes, is_on_gpu=is_on_gpu)
        assert found is wanted and line, (activation, wishes)
    for activation, line in (
        ("silu", "mode dense: a token computes all"),
        ("relu", "mode exact: a token computes neurons that fire"),
    ):
        experts = make_model(spec=mixture_spec(make_sizes(), activation=activation))
        found = choose_predictors(experts, Wishes(), is_on_gpu=False)
        assert found[0] is False and found[1].startswith(line)
    has_some = make_model(predictor_rank=8)
    assert choose_predictors(has_some, Wishes(), is_on_gpu=False)[0] is False


def test_predictors_are_worth_it_where_few_neurons_fire():
    model = make_model(sizes=make_sizes(num_neurons=1024), kind="f16")
    assert worth(model, 0.05, has_plan=False)[0] and not worth(model, 0.6, has_plan=False)[0]
    wide = make_model(sizes=make_sizes(num_neurons=32, vocab_size=4096), kind="f16")
    assert worth(wide, 0.05, has_plan=True)[0] and not worth(wide, 0.05, has_plan=False)[0]


def test_a_mixtures_file_keeps_its_type_unless_its_experts_are_silent(tmp_path):
    """In llama.cpp's layout the rows of silent neurons cannot be left out, so such a file is
    converted; predictors are refused before any stage."""
    given = tmp_path / "m.gguf"
    mixture(layout="stock", kind="q8_0", num_neurons=64).save(given)
    for activation, layout in ((None, "stock"), ("relu", "sparse")):  # None: as llama.cpp's, SiLU
        source = look_at(given, activation, tmp_path / "none.gguf")
        assert source.own_type == "q8_0"
        found = choose(source, wishes_of(), Room(main=1 << 40))
        assert (found.layout, found.predictors, found.budgets) == (layout, False, ())
        with pytest.raises(HotsplitError, match="predictors are not supported for mixtures"):
            choose(source, wishes_of(mode="predicted"), Room(main=1 << 40))


def test_powerinfers_files_are_run_as_they_are(relu, tmp_path):
    sizes = {"num_layers": 2, "width": 32, "num_neurons": 64}
    stages.convert(stages.ConvertConfig(source=relu, output=tmp_path / "m.gguf", outtype="f32"))
    random_dejavu(tmp_path / "p", **sizes)
    path = tmp_path / "m.powerinfer.gguf"
    powerinfer_file(path, ModelFile.load(tmp_path / "m.gguf"), "llama", tmp_path / "p")
    found = choose(look_at(path, None, tmp_path / "none.gguf"), Wishes(), Room(main=1 << 40))
    assert not found.is_converted and found.predictors is False and not found.budgets
    assert "the file has predictors" in found.lines[1]


# ---- estimates ----------------------------------------------------------------------------------


def job_of(relu, **wishes):
    cache = RunCache.open()
    given = look_at(relu, None, cache.folder / "none.gguf")
    return prepare.job_of(given, wishes_of(**wishes), cache)


def test_estimates_follow_the_measured_rates(relu):
    job = job_of(relu, tokens=1300, mode="predicted")
    flop = stages.flop_per_token(job.choice.model)
    job.rates.stored |= {"count": 100 * flop, "train": 10 * flop, "write": 1e9}
    job.rates.stored[stages.conversion_name(job)] = 1e4
    works = {work.kind: work for work in prepare.estimate_of(job).works}
    assert works["profile"].seconds == pytest.approx(130)
    assert works["model"].seconds == pytest.approx(works["model"].num_bytes / 1e4)
    written = stages.ConvertConfig(source=relu, output=job.cache.folder / "m.gguf", outtype="q8_0")
    stages.convert(written)
    size = sum(entry.num_bytes for entry in ModelFile.load(written.output).tensors.values())
    assert works["model"].num_bytes == size


def test_patience_says_how_many_tokens(relu):
    job = job_of(relu)
    rate = 131_072 * estimate.TRAIN_FACTOR / estimate.PATIENCE_S
    for per_s, tokens in ((rate, 131_072), (rate / 2.1, 32_768), (rate / 9, None)):
        assert estimate.tokens_for(job, per_s) == tokens
    asked = job_of(relu, mode="predicted")
    assert estimate.tokens_for(asked, rate / 9) == 16_384
    assert estimate.tokens_for(job_of(relu, tokens=1300), 1.0) == 1300


def test_a_look_that_cannot_change_the_choice_is_left_out(capsys, relu, monkeypatch):
    monkeypatch.setattr("hotsplit.run.estimate.matmul_flops", lambda device: 1e6)
    assert main(["run", str(relu), "-p", "the", "-n", "1", "--no-verify"]) == 0
    shown = capsys.readouterr().err
    assert (
        "mode exact: training predictors would take about" in shown
        and "look" not in shown.split("stage")[-1]
    )
    assert "look about" in estimate.estimate(job_of(relu, mode="predicted"), 16_384).line


def test_rates_are_kept_for_the_next_time(relu):
    job = job_of(relu)
    job.rates.note("count", 5.0)
    assert job_of(relu).rates.stored["count"] == 5.0
    job.rates.path.write_text("{")
    assert "count" not in job_of(relu).rates.stored


@pytest.mark.parametrize(
    "seconds, text",
    [(3, "a few seconds"), (31, "about 30 s"), (130, "about 2 min"), (7200, "about 2.0 h")],
)
def test_times_in_words(seconds, text):
    assert estimate.words(seconds) == text


# ---- the package's text -------------------------------------------------------------------------


def test_the_packages_text_has_its_notice(cache):
    with RunCache.open() as each:
        (path,) = stages.texts_of((), each)
        found = path.read_text(encoding="utf-8")
    assert len(found) == 1_019_278 and "Alice was beginning to get very tired" in found
    assert stages.DEFAULT_TEXT.stat().st_size < 300_000
    notice = stages.DEFAULT_TEXT.with_name("NOTICE.md").read_text()
    assert "PSF License Version 2" in notice and f"{len(found):,} characters" in notice


def test_text_in_tables_is_left_out_of_the_default_corpus_behind_links_too():
    page = run_path(str(ROOT / "run" / "default_corpus" / "build.py"))["DocumentPage"]()
    prose = "a paragraph that is long enough to be kept, since it has over forty letters"
    page.feed(
        f"<nav>n <a href=x>link</a> {prose}</nav><h1>{prose}<a class=headerlink href=x>#</a></h1>"
        f"<table><tr><td><a href=x>link</a> {prose}<a class=headerlink href=x>#</a> {prose}"
        f"</td></tr></table><p>{prose} <a href=x>with a link</a></p>"
    )
    assert page.paragraphs == [prose, f"{prose} with a link"]


WRONG = r"""
-p the -n 0 => max_tokens (-n) is 0, wanted 1 or more, or -1 for no limit
-p the --mode predicted => nothing to predict
-p the -c 1000 => the model has up to 128
-p the -c 1000 --kv-offload => the model has up to 128
-p the --kv-offload top=5 => multiple of the block
-p the -ctk q8_0 => multiple of 32
-p the --logprobs 3 => --logprobs goes with --json or --json-lines
-p the --logprobs 3000 --json => num_logprobs is 3000, wanted a whole number from 0 to 1000
--logprobs 3 => --logprobs is for a text: give -p TEXT
-p the --device gpu => device 'gpu'; wanted cpu or cuda
-p the --corpus none.txt => none.txt: no such file or folder
-p the --system x => --system, --system-file and --chat-template are for --chat
-p the --system-file x => --system-file and --chat-template are for --chat
-p the --chat --system-file none.txt => none.txt: no such file; wanted a system message
-p the --chat --chat-template-kwargs [ => --chat-template-kwargs: not JSON
-p the --chat --chat-template none => none: neither a file nor the name of a chat
-p the --json-schema { => the JSON schema is not JSON
-p the --regex ( => regex
-p the --top-p 7 => top_p is 7.0, wanted a number from 0 to 1
-p the --rope-scaling yarn => --rope-scaling yarn needs a factor, --rope-scale
-p the --rope-scale 0.5 => rope scale 0.5, wanted 1 to 10,000
-p the -md none.gguf => none.gguf: no such file or folder
--json => --json and --json-lines are for a text
 => has no chat template
"""


@pytest.mark.parametrize("words, message", rows_of(WRONG))
def test_wrong_options_are_refused_before_anything_is_made(capsys, silu, cache, words, message):
    code = main(["run", str(silu), *words.split()])
    shown = capsys.readouterr()
    assert code in (1, 2) and shown.out == ""
    assert message in shown.err.splitlines()[-1]
    assert list_cache(cache) == () and "stage 1" not in shown.err


def test_an_empty_prompt_and_a_missing_source_are_refused(capsys, silu, cache):
    for source, prompt, message in (
        (silu, "", "the prompt is empty"),
        (silu / "none", "the", "no such folder"),
    ):
        assert main(["run", str(source), "-p", prompt]) == 1
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert list_cache(cache) == ()


@pytest.mark.parametrize("words", ["", "--mode predicted"])
def test_too_few_tokens_are_refused_before_anything_is_made(capsys, relu, cache, words):
    code = main(["run", str(relu), "-p", "the", "--tokens", "1279", *words.split()])
    line = capsys.readouterr().err.splitlines()[-1]
    assert code == 1 and list_cache(cache) == ()
    assert "--tokens 1279: too few to train predictors, wanted 1,280 or more" in line


def test_a_dense_model_needs_no_tokens_to_train_on(capsys, silu):
    code = main(["run", str(silu), "-p", "the", "-n", "1", "--tokens", "3", "--no-verify"])
    assert code == 0, capsys.readouterr().err


def test_a_count_of_threads_is_remarked_on_once(capsys, silu):
    from hotsplit.runtime.kernels.threads import _note_too_many

    _note_too_many.cache_clear()
    assert main(["run", str(silu), "-p", "the", "-n", "1", "-t", "999", "--no-verify"]) == 0
    assert capsys.readouterr().err.count("note: 999 threads") == 1
    assert main(["run", str(silu), "-p", "the", "-n", "1", "-t", "1"]) == 0


TEMPLATE = "{{ messages[0].content }}{% if shout %}!!{% endif %} {{ messages[-1].content }}"


def test_an_answer_takes_the_variables_and_the_file_of_a_system_message(
    capsys, silu, tmp_path, monkeypatch
):
    """The text that is tokenised contains what the template rendered."""
    from hotsplit.runtime.text.codec import TextCodec

    template, system = tmp_path / "template.jinja", tmp_path / "system.txt"
    template.write_text(TEMPLATE)
    system.write_text("be brief\n")
    read, was = [], TextCodec.encode_rendered

    def encode(self, text, *more, **options):
        read.append(text)
        return was(self, text, *more, **options)

    monkeypatch.setattr(TextCodec, "encode_rendered", encode)
    words = ["-p", "hi", "--chat", "-n", "1", "--no-verify", "-sysf", system]
    words += ["--chat-template", template, "--chat-template-kwargs", '{"shout": true}']
    assert main(["run", *map(str, [silu, *words])]) == 0, capsys.readouterr().err
    assert any("be brief!! hi" in text for text in read)

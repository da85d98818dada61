"""`hotsplit eval --tasks`: lm-eval's tasks on our engine. Oracle: lm-eval's own model for
transformers on the same checkpoint, request by request, and its scores of the same tasks.

Tasks and their data are local files. lm-eval is not a dependency of the tests: without it, those
that need it are skipped (pip install lm-eval)."""

import dataclasses
import importlib.util
import json
import math
import sys
from types import SimpleNamespace

import pytest
from checkpoints import END, random_llama

from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.measure.evaluate.config import TasksConfig
from hotsplit.measure.evaluate.tasks import Score, TasksReport, _load
from hotsplit.options.engine_config import EngineConfig

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
)
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}} {{{{choices | join(' ')}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
GENERATION = """
task: generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["t", "\\n\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
TEXT = "the quick brown fox def add(a, b): return jumps over lazy dogs and cats in a b c"
WORDS = TEXT.split()


def documents() -> list[dict]:
    """Questions of several lengths, with choices of one to four words."""
    found = []
    for number in range(14):
        question = " ".join(WORDS[(number * 3 + i) % len(WORDS)] for i in range(3 + number % 5))
        choices = [f"{WORDS[(number + i) % len(WORDS)]} {' over' * i}".strip() for i in range(4)]
        found.append({"question": question, "choices": choices, "answer": number % 4})
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A checkpoint, its model file, and a folder of tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    random_llama(folder / "hf", max_position_embeddings=128)
    convert(ConvertConfig(source=folder / "hf", output=folder / "m.gguf", outtype="f32"))
    (folder / "data.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents()))
    (folder / "own").mkdir()
    for name, text in (("choice", CHOICE), ("rolling", ROLLING), ("generation", GENERATION)):
        (folder / "own" / f"{name}.yaml").write_text(text.format(data=folder / "data.jsonl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder / "cache"))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def theirs(here):
    """lm-eval's model for transformers, one text at a time. Its cache is off: it confuses a
    continuation of two tokens with one of a single token if context and continuation together are
    the same."""
    from lm_eval.models.huggingface import HFLM
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(here / "hf" / "tokenizer.json"), bos_token=END, eos_token=END,
        pad_token=END,
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(here / "hf").eval()
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=128,
                logits_cache=False)  # fmt: skip


@pytest.fixture(scope="module")
def ours(here):
    from hotsplit import Engine
    from hotsplit.measure.evaluate.lm_eval_model import EngineModel

    with Engine.load(here / "m.gguf", mode="dense", num_sequences=3) as engine:
        yield EngineModel(engine, num_texts=3)


def asked(*arguments: object) -> SimpleNamespace:
    """A request, as far as a model sees it."""
    return SimpleNamespace(args=arguments)


@needs_lm_eval
def test_log_likelihoods_equal_those_of_transformers(ours, theirs):
    """Empty contexts, contexts that end in spaces, continuations of one token and of many, texts
    longer than the model's context."""
    pairs = [("", "the fox"), ("the quick ", "brown fox"), ("the quick", " brown"), ("a", " b")]
    pairs += [(f"Q: {d['question']}\nA:", f" {c}") for d in documents() for c in d["choices"]]
    pairs += [("the fox jumps over " * 60, " lazy dogs"), (END + "the", " fox")]
    got = ours.loglikelihood([asked(*pair) for pair in pairs])
    for pair, ours_of, theirs_of in zip(
        pairs, got, theirs.loglikelihood(requests(pairs)), strict=True
    ):
        assert ours_of[0] == pytest.approx(theirs_of[0], rel=1e-4, abs=1e-4), pair
        assert ours_of[1] == theirs_of[1], pair
    # The order of requests changes no bit, however they share their beginnings.
    again = ours.loglikelihood([asked(*pair) for pair in pairs[::-1]])[::-1]
    assert got == again
    assert any(a != b for a, b in zip(got, got[1:], strict=False))


def requests(arguments: list[tuple]) -> list:
    """Requests in the form that lm-eval makes."""
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type="loglikelihood", doc={}, arguments=one, idx=i)
        for i, one in enumerate(arguments)
    ]


@needs_lm_eval
def test_whole_texts_and_continuations_equal_those_of_transformers(ours, theirs):
    texts = [("the quick brown fox",), ("over the lazy dogs and cats " * 40,)]
    got = ours.loglikelihood_rolling([asked(*text) for text in texts])
    assert got == pytest.approx(theirs.loglikelihood_rolling(requests(texts)), rel=1e-4)
    kwargs = {"until": ["t", "zz"], "max_gen_toks": 20, "do_sample": False}
    prompts = [(d["question"], kwargs) for d in documents()] + [("the fox " * 90, kwargs)]
    prompts.append(("other", {**kwargs, "until": "o", "max_gen_toks": 5}))
    got = ours.generate_until([asked(*prompt) for prompt in prompts])
    wanted = theirs.generate_until(requests(prompts))
    # Ours leaves out an incomplete character at the end of a text.
    assert [text.rstrip("\ufffd") for text in wanted] == [text.rstrip("\ufffd") for text in got]
    assert len(set(got)) > 3


@needs_lm_eval
@pytest.mark.parametrize(
    "asked_for, words",
    [({"max_gen_toks": "abc"}, "max_gen_toks 'abc'; wanted a number"),
     ({"max_tokens": [3]}, "max_tokens .*; wanted a number"),
     ({"max_new_tokens": math.inf}, "max_new_tokens .*; wanted a number"),
     ({"max_gen_toks": 2.5}, "max_gen_toks 2.5; wanted a whole number"),
     ({"temperature": "warm"}, "temperature 'warm'; wanted a number")],
)  # fmt: skip
def test_options_that_are_no_numbers_are_refused(asked_for, words):
    from hotsplit.measure.evaluate.lm_eval_model import MAX_TOKENS, options_of

    with pytest.raises(HotsplitError, match=f"the task asks for {words}"):
        options_of(asked_for, 0)
    assert options_of({"max_gen_toks": "40"}, 0)[1].max_tokens == 40
    assert options_of({}, 0)[1].max_tokens == MAX_TOKENS


@needs_lm_eval
def test_a_context_without_tokens_and_too_long_a_continuation_are_refused(ours):
    with pytest.raises(HotsplitError, match="of 2 tokens after none; wanted one or more tokens"):
        ours._loglikelihood_tokens([(("", "ab"), [], [1, 2])])
    too_long = [1] * (ours.max_length + 1)
    with pytest.raises(HotsplitError, match="of 129 tokens after 1; wanted 1 to 128, which is"):
        ours._loglikelihood_tokens([(("a", "b"), [1], too_long)])


@needs_lm_eval
def test_a_task_scores_as_with_transformers(here, theirs, capsys):
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = ["choice", "rolling", "generation"]
    manager = TaskManager(include_path=str(here / "own"), include_defaults=False)
    wanted = lm_eval.simple_evaluate(
        model=theirs, tasks=names, task_manager=manager, limit=12, num_fewshot=None,
        bootstrap_iters=0, log_samples=False, random_seed=0, fewshot_random_seed=0,
    )["results"]  # fmt: skip
    words = ["eval", here / "m.gguf", "--tasks", ",".join(names), "--task-folder", here / "own",
             "--limit", 12, "--mode", "dense", "--json"]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    found = json.loads(capsys.readouterr().out)
    scores = {(s["task"], s["metric"]): s for s in found["scores"]}
    assert found["mode"] == "dense" and {task for task, _ in scores} == set(names)
    for (task, metric), score in scores.items():
        assert score["value"] == pytest.approx(wanted[task][f"{metric},none"], rel=1e-4)
        assert score["num_documents"] == 12
    assert 0 < scores["choice", "acc"]["value"] < 1 and scores["choice", "acc"]["half_width"] > 0
    assert scores["rolling", "word_perplexity"]["value"] > 1


@needs_lm_eval
def test_unavailable_tasks_give_one_line(here, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = here / "own"
    (here / "far").mkdir()
    far = (own / "choice.yaml").read_text().replace("dataset_path: json", "dataset_path: org/none")
    (here / "far" / "far.yaml").write_text(far.replace("task: choice", "task: far"))
    odd = (own / "generation.yaml").read_text().replace("do_sample", "num_beams: 4, do_sample")
    (here / "far" / "odd.yaml").write_text(odd.replace("task: generation", "task: odd"))
    for more, match in (
        (["--tasks", "none"], "no task is called 'none'"),
        (["--tasks", "choice", "--task-folder", here / "nowhere"], "no such folder"),
        (["--tasks", "far", "--task-folder", here / "far"], "data is unavailable"),
        (["--tasks", "odd", "--task-folder", here / "far"], "option 'num_beams'"),
        (["--tasks", "choice,,", "--task-folder", own], "wanted different names"),
        (["--tasks", "choice", "--limit", 0], "limit is 0"),
    ):
        if more[1] == "none":
            more += ["--task-folder", own]
        words = ["eval", here / "m.gguf", "--mode", "dense", *more]
        assert main([str(word) for word in words]) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if "hotsplit:" in line]
        assert len(lines) == 1 and match in lines[0], (more, lines)


def test_tasks_run_under_a_scaling_of_positions(here):
    config = TasksConfig(
        model=here / "m.gguf", tasks=("x",),
        engine=EngineConfig(device="cpu", mode="dense", rope_scaling="yarn", rope_scale=4.0),
    )  # fmt: skip
    with _load(config, 1) as engine:
        assert engine.model.spec.rope_scaling.words.startswith("YaRN, 4 times the")
    with pytest.raises(HotsplitError, match="rope scaling 'x' is unknown"):
        dataclasses.replace(config.engine, rope_scaling="x", rope_scale=None)


def test_without_lm_eval_the_command_says_what_to_install(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(here / "m.gguf"), "--tasks", "hellaswag", "--limit", "2"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("pip install lm-eval")


@pytest.mark.parametrize(
    ("more", "match"),
    [([], "either --corpus"), (["--corpus", "x", "--tasks", "y"], "either --corpus"),
     (["--corpus", "x", "--limit", "3"], "--limit has no effect with --corpus"),
     (["--tasks", "x", "--tokens", "3"], "--tokens has no effect with --tasks")],
)  # fmt: skip
def test_a_corpus_or_tasks_but_not_both(more, match, capsys):
    assert main(["eval", "m.gguf", *more]) == 2
    assert match in capsys.readouterr().err


def test_tasks_are_unique_and_reported_in_one_line_each():
    config = TasksConfig(model="m", tasks=("a", "b"))
    for change in ({"tasks": ()}, {"tasks": ("a", "a")}, {"num_fewshot": -1}, {"seed": -1}):
        with pytest.raises(HotsplitError, match="wanted"):
            dataclasses.replace(config, **change)
    scores = (Score(task="a", metric="acc", value=0.5, half_width=0.1, num_documents=1200),
              Score(task="b", metric="bleu", value=3.25, half_width=None, num_documents=None))  # fmt: skip
    report = TasksReport(model_id="0", mode="exact", limit=None, scores=scores)
    assert report.lines[:2] == [
        "exact: a acc 0.5000 ± 0.1000, 1,200 documents", "exact: b bleu 3.2500",
    ]  # fmt: skip

"""lm-eval's own client on `serve`. Oracle: lm-eval's model for transformers.

Tasks and their data are local files. lm-eval is not a dependency of the tests: without it, this is
skipped (pip install 'lm-eval[api]' accelerate)."""

import importlib.util
import json

import pytest
from checkpoints import END, random_llama
from serving import Served

from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
)
TASKS = ("choice", "rolling", "generation")
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


def test_the_client_of_lm_eval_finds_the_scores_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    random_llama(tmp_path / "hf", max_position_embeddings=128)
    convert(ConvertConfig(source=tmp_path / "hf", output=tmp_path / "m.gguf", outtype="f32"))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents()))
    (tmp_path / "own").mkdir()
    for name, text in zip(TASKS, (CHOICE, ROLLING, GENERATION), strict=True):
        (tmp_path / "own" / f"{name}.yaml").write_text(text.format(data=tmp_path / "data.jsonl"))
    ends = {"bos_token": END, "eos_token": END, "pad_token": END}
    file = str(tmp_path / "hf" / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, **ends)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    manager = TaskManager(include_path=str(tmp_path / "own"), include_defaults=False)

    def scores(model, **options):
        given = {"tasks": list(TASKS), "task_manager": manager, "log_samples": True}
        found = lm_eval.simple_evaluate(model=model, **given, bootstrap_iters=0, **options)
        return found["samples"]

    # Its cache is off: it confuses a continuation of two tokens with one of a single token if
    # context and continuation together are the same.
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    want = scores(
        HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=128, logits_cache=False
        )
    )
    with Served(tmp_path / "m.gguf", "--parallel", "4") as served:
        given = {"model": "m", "max_length": 128, "batch_size": 4}
        given["base_url"] = f"{served.url}/v1/completions"
        given["tokenizer"] = str(tmp_path / "tokenizer")
        got = scores("local-completions", model_args=given)
    assert len(want["choice"]) == 14
    for mine, other in zip(got["choice"], want["choice"], strict=True):
        for (score, is_greedy), (right, was_greedy) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert float(score) == pytest.approx(float(right), abs=1e-4)
            assert str(is_greedy) == str(was_greedy)
    for name in ("rolling", "generation"):
        for mine, other in zip(got[name], want[name], strict=True):
            exact = name == "generation"
            found, right = mine["filtered_resps"], other["filtered_resps"]
            assert found == (right if exact else pytest.approx(right, abs=1e-3))

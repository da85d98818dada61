"""The cost of a mode, with its measurement error: against plain sums, on paragraphs as chat
messages, and as `profile` records and reports it."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from chat_templates import CHATML
from checkpoints import random_llama
from models import byte_level_keys, make_model, make_sizes

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.predictor_file import FILE_NAME, Predictors
from hotsplit.artifacts.profile_file import Profile
from hotsplit.cli import main
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.costs.default_mode import choose_mode, dense_bytes
from hotsplit.errors import HotsplitError
from hotsplit.measure.evaluate.comparison import (
    Comparison,
    batch_mean,
    increase_of,
    quantile_interval,
    student_t,
)
from hotsplit.measure.evaluate.quality import (
    EvalConfig,
    ShareCounter,
    compare_all,
    eval_content,
    evaluate,
    load_eval,
    mean_bytes,
)
from hotsplit.options.engine_config import EngineConfig
from hotsplit.profile.collect import profile
from hotsplit.profile.corpus.corpus import read_chat_windows
from hotsplit.profile.profile_config import ProfileConfig
from hotsplit.profile.report import warnings
from hotsplit.runtime.ops.neurons.feed_forward import Traffic

# ---- the measure -----------------------------------------------------------------------------


def test_student_t():
    for freedom, want in ((3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1000, 1.9623)):
        assert student_t(freedom) == pytest.approx(want, rel=8e-3)
    assert student_t(10) == pytest.approx(2.2281, rel=1e-4)


def correlated(random, num_windows, length):
    """f64 [windows, length]: values of mean 0 that are correlated within a window, AR(1) with
    coefficient 0.9."""
    noise = random.standard_normal((num_windows, length))
    values = np.zeros_like(noise)
    for t in range(1, length):
        values[:, t] = 0.9 * values[:, t - 1] + noise[:, t]
    return torch.from_numpy(values)


def test_intervals_contain_the_truth_as_often_as_they_claim():
    random, inside, naive = np.random.default_rng(0), 0, 0
    for _ in range(200):
        values = correlated(random, 12, 512).flatten()
        found = batch_mean(values, [512] * 12)
        inside += abs(found.mean) <= found.half_width
        naive += abs(found.mean) <= 1.96 * values.std().item() / math.sqrt(len(values))
    # 95 %, but batches of 128 are still a little correlated.
    assert 0.85 < inside / 200 < 0.99
    assert naive / 200 < 0.6, "intervals that take tokens for independent pass, too"


def test_the_interval_of_a_high_quantile_contains_it_as_often_as_it_claims():
    """The tokens are correlated; the truth is the quantile of the stationary AR(1)."""
    random, inside = np.random.default_rng(1), 0
    truth = 2.3263 / math.sqrt(1 - 0.9**2)
    for _ in range(200):
        values = correlated(random, 24, 1024).flatten()
        low, high = quantile_interval(values, 0.99, [1024] * 24)
        assert low <= values.quantile(0.99).item() <= high
        inside += low <= truth <= high
    assert 0.88 < inside / 200 < 0.995
    # The interval's upper end would be beyond the largest value.
    assert quantile_interval(torch.rand(100), 0.99, [100]) is None
    assert quantile_interval(torch.ones(3), 0.99, [3]) is None


def test_too_short_a_text_has_no_interval():
    assert batch_mean(torch.rand(3), [3]).half_width is None
    assert batch_mean(torch.rand(64), [64]).half_width > 0
    assert batch_mean(torch.ones(640), [512, 128]).half_width == 0


def test_a_comparison_equals_plain_sums():
    generator = torch.Generator().manual_seed(0)
    dense, other = (torch.randn(300, 40, generator=generator) for _ in range(2))
    other = dense + 0.3 * other
    next_T = torch.randint(40, (300,), generator=generator)
    comparison = Comparison(2)
    for start in (0, 200):
        comparison.begin_window()
        piece = slice(start, min(start + 200, 300))
        comparison.add(dense[piece], [other[piece], dense[piece]], next_T[piece])
    found, same = comparison.result(0), comparison.result(1)
    p, q = dense.double().softmax(1), other.double().softmax(1)
    assert found.divergence.mean == pytest.approx((p * (p / q).log()).sum(1).mean().item())
    losses = [-x.gather(1, next_T[:, None]).log().mean().item() for x in (p, q)]
    assert [found.dense_loss.mean, found.loss.mean] == pytest.approx(losses)
    increase = increase_of(found.loss_difference)
    assert increase.mean == pytest.approx(math.exp(losses[1] - losses[0]) - 1)
    assert found.agreement.mean == (p.argmax(1) == q.argmax(1)).double().mean().item()
    # Paired: the interval of the difference is much narrower than that of the loss alone.
    alone = batch_mean(-q.gather(1, next_T[:, None]).log()[:, 0], [200, 100]).half_width
    assert found.loss_difference.half_width < 0.6 * alone
    assert same.loss_difference.mean == same.divergence.mean == 0.0
    assert same.loss_difference.half_width == 0.0 and same.agreement.mean == 1.0


# ---- bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_bytes_are_those_that_the_runtime_reads(tmp_path, mode):
    """Compares feed-forward bytes with the runtime's own count while it decodes the same tokens."""
    model = make_model(predictor_rank=8, kind="f16")
    model.save(tmp_path / "m.gguf")
    ids = torch.arange(20)
    shares = ShareCounter(model)
    with Engine.load(tmp_path / "m.gguf", mode=mode) as engine:
        with engine.observe(shares.observe, shares.wants):
            engine.logits(ids)
        assert isinstance(engine.traffic, Traffic)
        engine.hidden(ids[:1])
        before = engine.traffic.total
        for position in range(1, 20):
            engine._step(int(ids[position]), position)
        read = (engine.traffic.total - before) / 19
    neurons = 2 * 96 * 3 * 2 * 64
    others = dense_bytes(model) - neurons
    assert mean_bytes(model, mode, shares) - others == pytest.approx(read, rel=0.04)


@pytest.fixture
def evaluated(tmp_path) -> list[str]:
    """The command `eval` for a model with predictors and a text."""
    keys, vocab_size = byte_level_keys()
    shape = make_sizes(vocab_size=vocab_size, context_length=64)
    make_model(sizes=shape, predictor_rank=8, extra_keys=keys).save(tmp_path / "m.gguf")
    (tmp_path / "t.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return ["eval", str(tmp_path / "m.gguf"), "--corpus", str(tmp_path / "t.txt")]


def test_every_figure_has_an_interval_and_json_preserves_it(tmp_path, evaluated, capsys):
    """Shares of neurons also equal plain sums over tokens."""
    assert main([*evaluated, "--mode", "predicted", "--json"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "e.json").write_text(printed)
    found = load_eval(tmp_path / "e.json")
    values = json.loads(printed)
    assert dataclasses.asdict(found) == {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in values.items()
        if key not in ("format", "version")
    }
    for wrong in (1.1e12, math.inf, math.nan):  # refused when written as when read
        with pytest.raises(HotsplitError, match="^mode predicted: perplexity is "):
            eval_content(dataclasses.replace(found, perplexity=wrong))
        (tmp_path / "w.json").write_text(json.dumps(values | {"perplexity": wrong}))
        with pytest.raises(HotsplitError, match="perplexity is "):
            load_eval(tmp_path / "w.json")
    (note,) = found.notes  # in the text output, the first line
    assert note.endswith("tokens of text, fewer than the 16,384 of --tokens")
    for wrong in ("a note", ["two\nlines"], [1]):
        (tmp_path / "w.json").write_text(json.dumps(values | {"notes": wrong}))
        with pytest.raises(HotsplitError, match="notes"):
            load_eval(tmp_path / "w.json")
    widths = [key for key in values if key.endswith("half_width")]
    assert len(widths) == 8 and all(values[key] is not None for key in widths)
    assert values["model_id"] == ModelFile.load(tmp_path / "m.gguf").model_id
    line = found.line + found.neurons_line
    assert line.count("±") == 8 and f"p99 {found.kl_p99:.4f}" in line
    shares = ShareCounter(ModelFile.load(tmp_path / "m.gguf"))
    hidden_TF = torch.rand(300, 96) - 0.5
    for layer in (0, 1):
        for part in hidden_TF.split(70):
            shares.observe("ffn_hidden", layer, part.relu() * (layer + 1))
    share = (hidden_TF > 0).double().mean().item()
    assert shares.hidden_share_L == pytest.approx([share, share])
    mean = shares.mean_share("ffn_hidden")
    assert mean.mean == pytest.approx(share) and 0 < mean.half_width < 0.03
    assert shares.mean_share("ffn_predicted").half_width is None


@pytest.mark.parametrize(
    "words, is_itself",
    [(("--mode", "dense"), True), ((), False), (("--mode", "dense", "-ctk", "bf16"), False)],
)
def test_a_model_compared_with_itself_is_noted(evaluated, capsys, words, is_itself):
    assert main([*evaluated, *words]) == 0
    lines = [
        x for x in capsys.readouterr().err.splitlines() if "compares the model with itself" in x
    ]
    assert len(lines) == is_itself and all("--mode exact" in line for line in lines)


# ---- messages --------------------------------------------------------------------------------


@pytest.fixture
def chat_model(tmp_path):
    keys, vocab_size = byte_level_keys()
    model = make_model(
        sizes=make_sizes(vocab_size=vocab_size, context_length=512),
        kind="f16",
        extra_keys={**keys, "tokenizer.chat_template": CHATML},
    )
    model.save(tmp_path / "m.gguf")
    return ModelFile.load(tmp_path / "m.gguf")


TEXT = "The first paragraph,\nof two lines.\n\n  \nshort\n\nThe second one is of a single line."


def test_paragraphs_are_messages_and_only_they_count(tmp_path, chat_model):
    (tmp_path / "t.txt").write_text(TEXT)
    with Engine.load(chat_model.path, mode="dense") as engine:
        codec = engine.codec
        windows, counted = read_chat_windows(
            [tmp_path / "t.txt"],
            chat_model,
            codec,
            template=None,
            context_length=512,
            max_tokens=1000,
            seed=0,
        )
        texts = [codec.tokenizer.decode(ids.tolist()) for ids in windows]
        kept = [
            codec.tokenizer.decode(ids[mask].tolist())
            for ids, mask in zip(windows, counted, strict=True)
        ]
    paragraphs = [p for p in TEXT.split("\n\n") if len(p.strip()) > 16]
    assert kept == paragraphs
    wanted = [f"<|im_start|>user\n{p}<|im_end|>\n" for p in paragraphs]
    assert texts == wanted


def test_eval_counts_messages(tmp_path, chat_model, capsys):
    (tmp_path / "t.txt").write_text(TEXT * 3)
    plain = ["eval", str(chat_model.path), "--corpus", str(tmp_path / "t.txt"), "--json"]
    found = {}
    for name, more in (
        ("plain", []),
        ("own", ["--chat-template"]),
        ("named", ["--chat-template", "chatml"]),
    ):
        assert main([*plain, *more]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    paragraphs = [p.strip() for p in (TEXT * 3).split("\n\n") if len(p.strip()) >= 16]
    assert found["own"]["num_tokens"] == sum(map(len, paragraphs)) == found["named"]["num_tokens"]
    assert found["own"]["dense_perplexity"] != found["plain"]["dense_perplexity"]
    assert found["own"]["dense_perplexity"] == found["named"]["dense_perplexity"]
    assert main([*plain[:-1], "--tokens", "20", "--chat-template"]) == 0
    said = capsys.readouterr().err
    assert "20 tokens" in said and "±" in said


def test_texts_without_paragraphs_and_templates_that_change_them_are_refused(tmp_path, chat_model):
    (tmp_path / "t.txt").write_text("a\n\nb\n\nc")
    config = EvalConfig(model=chat_model.path, corpora=(tmp_path / "t.txt",), chat_template="")
    with pytest.raises(HotsplitError, match="no paragraph of 16 tokens"):
        evaluate(config)
    (tmp_path / "t.txt").write_text("This is a paragraph of enough tokens.")
    (tmp_path / "upper").write_text("{{ messages[0]['content'] | upper }}")
    with pytest.raises(HotsplitError, match="changes messages"):
        evaluate(dataclasses.replace(config, chat_template=str(tmp_path / "upper")))


def test_masked_tokens_do_not_count(chat_model):
    ids = torch.randint(200, (60,), generator=torch.Generator().manual_seed(1))
    counted = torch.zeros(60, dtype=torch.bool)
    counted[20:] = True
    with (
        Engine.load(chat_model.path, mode="dense") as dense,
        Engine.load(chat_model.path, mode="exact") as engine,
    ):
        (part,) = compare_all(dense, [engine], [ids], counted=[counted])
        logits_TV = dense.logits(ids)
    loss = -logits_TV.double().log_softmax(1)[19:59].gather(1, ids[20:, None]).mean()
    assert part.num_tokens == 40 and math.log(part.dense_perplexity) == pytest.approx(loss.item())


# ---- what profile records --------------------------------------------------------------------


def test_profile_records_both_modes_and_convert_keeps_them(tmp_path):
    folder = random_llama(tmp_path / "hf")
    convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf", outtype="f16"))
    random = np.random.default_rng(0)
    words = ["the", "quick", "brown", "fox", "def", "add(a,", "return", "jumps", "lazy", "dog"]
    (tmp_path / "t.txt").write_text(" ".join(words[i] for i in random.integers(0, 10, 5000)))
    report = profile(
        ProfileConfig(
            model=tmp_path / "m.gguf",
            corpora=(tmp_path / "t.txt",),
            output=tmp_path / "p",
            max_tokens=6000,
            train_predictors=tmp_path,
            predictor_rank=32,
        )
    )
    record = Profile.load(tmp_path / "p").quality
    assert set(record) == {"exact", "predicted"} == set(report.record)
    assert record == Predictors.load(tmp_path / FILE_NAME).quality
    assert report.quality.mode == "predicted"
    assert record["predicted"].perplexity_increase == report.quality.perplexity_increase
    assert record["exact"].num_tokens == record["predicted"].num_tokens > 100
    assert record["exact"].kl_mean == record["exact"].perplexity_increase == 0
    dense = dense_bytes(ModelFile.load(tmp_path / "m.gguf"))
    assert record["exact"].dense_bytes_per_token == dense > record["exact"].bytes_per_token
    convert(
        ConvertConfig(source=tmp_path / "m.gguf", output=tmp_path / "m2.gguf", predictors=tmp_path)
    )
    model = ModelFile.load(tmp_path / "m2.gguf")
    assert model.quality == record
    cheap = [mode for mode in record if record[mode].perplexity_increase <= 0.01]
    assert choose_mode(model).mode == min(cheap, key=lambda mode: record[mode].bytes_per_token)
    # eval measures about the same on 1,000 tokens of the text.
    found = evaluate(
        EvalConfig(
            model=tmp_path / "m2.gguf",
            corpora=(tmp_path / "t.txt",),
            engine=EngineConfig(mode="exact"),
            max_tokens=1000,
        )
    )
    assert found.hidden_share_L == pytest.approx([0.5] * 3, abs=0.1)
    assert found.bytes_per_token == pytest.approx(record["exact"].bytes_per_token, rel=0.05)
    assert_warnings(report)


def assert_warnings(report) -> None:
    """Warnings appear if predictors do not pay or modes cost too much, and only then."""
    quality = report.quality_L[0]
    bad = dataclasses.replace(quality, break_even_density=0.3)
    good = dataclasses.replace(quality, break_even_density=0.99)
    cheap = {
        mode: dataclasses.replace(q, perplexity_increase=0.001) for mode, q in report.record.items()
    }
    silent = dataclasses.replace(report, quality_L=(good,) * 3, record=cheap)
    assert warnings(silent) == []
    (line,) = warnings(dataclasses.replace(silent, quality_L=(bad, good, bad)))
    assert "in 2 of 3 layers the predictor reads more than it saves" in line and "30%" in line
    costly = dataclasses.replace(cheap["predicted"], perplexity_increase=0.18)
    (line,) = warnings(dataclasses.replace(silent, record=cheap | {"predicted": costly}))
    assert "predicted +18.0%" in line and "exact +" not in line and "only on request" in line

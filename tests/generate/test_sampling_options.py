"""Sampling options: refusals, spellings on the command line, and DRY's sequence breakers."""

import json
from dataclasses import asdict

import click
import numpy as np
import pytest
from click.testing import CliRunner
from paths import ROOT
from tokenizers import Tokenizer

from hotsplit.commands.options.sampling_options import sampling_options, take_sampling_options
from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import (
    DEFAULT_SAMPLERS,
    LETTERS,
    SamplingOptions,
    bias_of,
    samplers_of_letters,
    samplers_of_names,
)
from hotsplit.runtime.generate.dry import dry_breakers, repeats, tokens_since_breaker
from hotsplit.runtime.text.codec import TextCodec

NAN, INF = float("nan"), float("inf")

REFUSED = [
    ({"temperature": NAN}, "temperature is nan, wanted a number"),
    ({"temperature": "hot"}, "temperature is 'hot', wanted a number"),
    ({"dynatemp_exponent": -1.0}, "dynatemp_exponent is -1.0, wanted a number from 0 to 1e+06"),
    ({"top_k": 1.5}, "top_k is 1.5, wanted a whole number"),
    ({"top_p": 1.01}, "top_p is 1.01, wanted a number from 0 to 1"),
    ({"top_n_sigma": INF}, "top_n_sigma is inf, wanted a number"),
    ({"repeat_last_n": -2}, "repeat_last_n is -2, wanted a whole number from -1"),
    ({"repeat_penalty": 0.0}, "repeat_penalty is 0, wanted more than 0; 1 turns it off"),
    ({"presence_penalty": INF}, "presence_penalty is inf, wanted a number from -1e+06 to 1e+06"),
    ({"dry_base": 0.5}, "dry_base is 0.5, wanted a number from 1 to 1e+06"),
    ({"dry_allowed_length": -1}, "dry_allowed_length is -1, wanted a whole number from 0"),
    (
        {"dry_sequence_breakers": ("",)},
        "dry_sequence_breakers has '', wanted text; () for no breakers",
    ),
    ({"adaptive_target": 1.5}, "adaptive_target is 1.5, wanted a number up to 1"),
    ({"adaptive_decay": 1.0}, "adaptive_decay is 1.0, wanted a number from 0 to 0.99"),
    ({"mirostat": 3}, "mirostat is 3, wanted 0, 1 or 2"),
    ({"logit_bias": ((-1, 1.0),)}, "logit_bias has token -1, wanted a token id from 0"),
    ({"logit_bias": ((1, NAN),)}, "logit_bias of token 1 is nan, wanted a number"),
    ({"samplers": ("top_k", "best")}, f"no sampler is called 'best'; known: {', '.join(LETTERS)}"),
    ({"samplers": ("top_k", "top_k")}, "samplers has 'top_k' twice; name it once"),
    ({"seed": 1 << 64}, "seed is 18446744073709551616, wanted a 64-bit integer, say 0"),
    ({"temperature": 10**400}, "temperature is a number of more than 60 digits, wanted a number"),
    (
        {"logit_bias": ((1, 10**400),)},
        "logit_bias of token 1 is a number of more than 60 digits, wanted a number",
    ),
]


@pytest.mark.parametrize("values, line", REFUSED, ids=[line for _, line in REFUSED])
def test_impossible_values_are_refused(values, line):
    with pytest.raises(HotsplitError) as error:
        SamplingOptions(**values)
    assert str(error.value) == line


def test_the_bounds_are_accepted():
    for values in (
        {"top_p": 0, "min_p": 1, "typ_p": 0, "xtc_probability": 1, "xtc_threshold": 1},
        {"temperature": -1, "top_k": -1, "top_n_sigma": -1, "repeat_last_n": -1, "samplers": ()},
        {"seed": -(1 << 63)},
        {"seed": (1 << 64) - 1},
        {"logit_bias": ((0, -INF), (0, INF))},
    ):
        SamplingOptions(**values)


def test_orders_of_samplers_by_names_and_by_letters():
    assert samplers_of_letters("edskypmxt") == DEFAULT_SAMPLERS
    assert samplers_of_names(";".join(DEFAULT_SAMPLERS)) == DEFAULT_SAMPLERS
    assert samplers_of_names("Top-K; topp;temp;nucleus;typ") == (
        "top_k",
        "top_p",
        "temperature",
        "top_p",
        "typ_p",
    )
    assert samplers_of_names("") == samplers_of_letters("") == ()
    with pytest.raises(HotsplitError, match="no sampler has the letter 'q'; known: e penalties, d"):
        samplers_of_letters("kq")
    for text in ("best", "top_k;", ";"):
        with pytest.raises(HotsplitError, match="no sampler is called"):
            samplers_of_names(text)


def test_biases_are_read_as_llama_cpp_does():
    assert bias_of("15043+1") == (15043, 1.0)
    assert bias_of("15043-1.5e-3") == (15043, -0.0015)
    assert bias_of("0-inf") == (0, -INF)
    for text in ("", "15043", "+1", "-5+1", "x+1", "5+", "5+x", "5+nan"):
        with pytest.raises(HotsplitError, match="logit.bias"):
            bias_of(text)


# ---- the command line ---------------------------------------------------------------------


@click.command()
@click.option("--other", default=1)
@sampling_options
def draw(other: int, **arguments: object) -> None:
    options = SamplingOptions(**take_sampling_options(arguments))
    assert not arguments and other == 1
    click.echo(json.dumps(asdict(options)))


def options_of(*arguments: str) -> SamplingOptions:
    done = CliRunner().invoke(draw, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    values = json.loads(done.output)
    values["logit_bias"] = tuple(map(tuple, values["logit_bias"]))
    for name in ("samplers", "dry_sequence_breakers"):
        values[name] = tuple(values[name])
    return SamplingOptions(**values)


SPELLED = [
    ("--temp 0.5", {"temperature": 0.5}),
    ("--temperature 0", {"temperature": 0.0}),
    ("--top-k 7", {"top_k": 7}),
    ("--top-p 0.5", {"top_p": 0.5}),
    ("--min-p 0", {"min_p": 0.0}),
    ("--typical 0.5", {"typ_p": 0.5}),
    ("--typical-p 0.5", {"typ_p": 0.5}),
    ("--top-nsigma 2", {"top_n_sigma": 2.0}),
    ("--top-n-sigma 2", {"top_n_sigma": 2.0}),
    ("--xtc-probability 0.5 --xtc-threshold 0.2", {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
    ("--repeat-last-n 9", {"repeat_last_n": 9}),
    ("--repeat-penalty 1.1", {"repeat_penalty": 1.1}),
    ("--presence-penalty 0.1", {"presence_penalty": 0.1}),
    ("--frequency-penalty -0.1", {"frequency_penalty": -0.1}),
    ("--dry-multiplier 0.8 --dry-base 2", {"dry_multiplier": 0.8, "dry_base": 2.0}),
    ("--dry-allowed-length 3", {"dry_allowed_length": 3}),
    ("--dry-penalty-last-n -1", {"dry_penalty_last_n": -1}),
    ("--dry-sequence-breaker a --dry-sequence-breaker b", {"dry_sequence_breakers": ("a", "b")}),
    ("--dry-sequence-breaker none", {"dry_sequence_breakers": ()}),
    (
        "--dry-sequence-breaker a --dry-sequence-breaker none --dry-sequence-breaker b",
        {"dry_sequence_breakers": ("b",)},
    ),
    ("--dynatemp-range 0.5 --dynatemp-exp 2", {"dynatemp_range": 0.5, "dynatemp_exponent": 2.0}),
    (
        "--mirostat 2 --mirostat-lr 0.2 --mirostat-ent 4",
        {"mirostat": 2, "mirostat_lr": 0.2, "mirostat_ent": 4.0},
    ),
    ("-l 5+1 --logit-bias 6-inf", {"logit_bias": ((5, 1.0), (6, -INF))}),
    ("--adaptive-target 0.3 --adaptive-decay 0.5", {"adaptive_target": 0.3, "adaptive_decay": 0.5}),
    ("--samplers top_k;temp", {"samplers": ("top_k", "temperature")}),
    ("-s 3", {"seed": 3}),
    ("--seed -1", {"seed": None}),
    ("", {}),
]


@pytest.mark.parametrize("line, values", SPELLED, ids=[line for line, _ in SPELLED])
def test_llama_cpps_spellings(line, values):
    assert options_of(*line.split()) == SamplingOptions(**values)


def test_bad_values_are_refused():
    done = CliRunner().invoke(draw, ["-l", "nothing"])
    assert done.exit_code == 2 and "wanted TOKEN+BIAS or TOKEN-BIAS" in done.output
    done = CliRunner().invoke(draw, ["--top-p", "2"])
    assert isinstance(done.exception, HotsplitError)


def test_help_is_short_and_the_rest_is_on_a_separate_page():
    short = CliRunner().invoke(draw, ["--help"]).output
    full = CliRunner().invoke(draw, ["--help-sampling"]).output
    spelled = {word for line, _ in SPELLED for word in line.split() if word.startswith("--")}
    assert all(word in full for word in spelled)
    always = "--temp --temperature --top-k --top-p --min-p --repeat-penalty --seed"
    assert {word for word in spelled if word in short} == {*always.split(" ")}


# ---- DRY ----------------------------------------------------------------------------------


def test_breakers_are_found_in_tokens_and_across_them():
    path = ROOT / "examples/tiny-relu/tokenizer.json"
    codec = TextCodec(Tokenizer.from_file(str(path)), None, frozenset())
    encode = codec.tokenizer.encode
    found = dry_breakers(codec, ["self.", "\U0001f642"])
    words = {
        i: codec.tokenizer.decode([i], skip_special_tokens=False)
        for i in range(codec.tokenizer.get_vocab_size())
    }
    for i, word in words.items():
        assert (() in found.get(i, ())) == ("self." in word), word
        if word.endswith("self") and "self." not in word:
            assert tuple(encode(".").ids) in found[i]
    smile = encode("\U0001f642").ids
    assert len(smile) > 1 and tuple(smile[1:]) in found[smile[0]]
    for text in ("x = self.name", "(self.a", "a \U0001f642 b c d"):
        ids = encode(text).ids
        assert tokens_since_breaker(np.array(ids), found) < len(ids), text
    ids = encode("nothing here selfish").ids
    assert tokens_since_breaker(np.array(ids), found) == len(ids)
    assert dry_breakers(codec, []) == {}


def test_repetitions_end_at_breakers():
    # llama.cpp's example: a b c c b c y a b c
    text = np.array([1, 2, 3, 3, 2, 3, 9, 1, 2, 3])
    assert repeats(text, 1, 100, {}) == {3: 3, 2: 1, 9: 2}
    assert repeats(text, 2, 100, {}) == {3: 3, 9: 2}
    assert repeats(text, 1, 100, {1: ((),)}) == {3: 2, 2: 1, 9: 2}
    assert repeats(text, 1, 100, {2: ((3,),)}) == {}
    assert repeats(text, 1, 1, {}) == {3: 2, 2: 1, 9: 2}
    assert repeats(text, 2, 0, {}) == {3: 2, 9: 2} and repeats(text, 1, None, {})[3] == 3
    assert repeats(np.array([], np.int64), 0, 100, {}) == {}

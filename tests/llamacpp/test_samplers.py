"""Our samplers and llama.cpp's give the same candidates and probabilities for the same logits.

llama.cpp computes in float32 and leaves the order of equal logits open, so for ties the number of
survivors and their probabilities are compared, not which of them survive. Logits have no -inf for
typical-p and Mirostat 1 (NaN in llama.cpp), for dynamic temperature and XTC with min_keep
(llama.cpp counts impossible tokens; we do not), for logit biases and for adaptive-p. No logits have
+inf, which llama.cpp turns into NaN everywhere."""

import json
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from paths import ROOT

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.options.generation_options import SamplingOptions
from hotsplit.runtime.generate.candidates import Candidates
from hotsplit.runtime.generate.dry import dry_breakers
from hotsplit.runtime.generate.sampler_chain import SamplerChain
from hotsplit.runtime.text.codec import TextCodec

PYTHON = ROOT / "build/llamacpp-venv/bin/python"
DRAW = ["dist", 1]


@dataclass
class Case:
    """A chain of samplers in two forms, as llama.cpp's calls (without the final draw) and as our
    options, with the logits and the history that it gets."""

    chain: list[list]
    options: SamplingOptions
    logits: np.ndarray
    history: list[int] = field(default_factory=list)


def ask(tmp_path: Path, cases: list[Case], *, ends: list | None = DRAW, model: str = "") -> dict:
    inputs, output = tmp_path / "inputs.npz", tmp_path / "output.npz"
    np.savez(inputs, **{str(number): case.logits for number, case in enumerate(cases)})
    chains = [{"chain": c.chain + [ends] * bool(ends), "history": c.history} for c in cases]
    request = {"model": model, "inputs": str(inputs), "output": str(output), "cases": chains}
    command = [PYTHON, ROOT / "tests/llamacpp/sampler_oracle.py"]
    given = {"input": json.dumps(request), "text": True, "timeout": 300}
    done = subprocess.run(command, capture_output=True, **given)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(output) as found:
        return dict(found)


def difference(
    step_V: np.ndarray, ours: Candidates, ids: np.ndarray, p: np.ndarray, tolerance: float = 1e-5
) -> str:
    """The difference between our candidates and llama.cpp's ids and probabilities; '' if none. If
    logits tie, the ids may differ."""
    there = {int(i): float(q) for i, q in zip(ids, p, strict=True) if q > 1e-30}
    here = {
        int(i): float(q) for i, q in zip(ours.ids_A, ours.probability_A, strict=True) if q > 1e-30
    }
    if len(there) != len(here):
        return f"{len(here)} candidates, llama.cpp {len(there)}"
    worst = np.abs(np.sort(list(here.values())) - np.sort(list(there.values()))).max()
    if worst > tolerance:
        return f"probabilities {worst} apart"
    has_ties = len(np.unique(step_V)) < len(step_V)
    if not has_ties and here.keys() != there.keys():
        return f"other tokens: {sorted(here.keys() ^ there.keys())[:6]}"
    return ""


def differences(tmp_path: Path, cases: list[Case], **more) -> list:
    """(number, difference, case) of the cases that differ by more than rounding (see is_rounding).
    Asserts that at most one case in fifty differs by rounding."""
    found = ask(tmp_path, cases, **more)
    wrong, num_rounded = [], 0
    for number, case in enumerate(cases):
        theirs = found[f"{number}.0.ids"], found[f"{number}.0.p"]
        why = difference(case.logits, distribution(case), *theirs)
        if not why:
            continue
        if is_rounding(case, *theirs):
            num_rounded += 1
        else:
            wrong.append((number, why, case))
    assert num_rounded <= 0.02 * len(cases), num_rounded
    return wrong


def is_rounding(case: Case, ids: np.ndarray, p: np.ndarray) -> bool:
    """True if a threshold higher or lower by a share of 2e-5 gives llama.cpp's candidates; or, with
    typical-p, if the candidates differ in one or two tokens, whatever their probabilities: one may
    have taken the place of another that is about as typical."""
    if any(not difference(case.logits, distribution(other), ids, p) for other in near(case)):
        return True
    swapped = set(distribution(case).ids_A.tolist()) ^ set(ids[p > 1e-30].tolist())
    return case.options.typ_p < 1 and 0 < len(swapped) <= 2


def near(case: Case) -> list[Case]:
    thresholds = ("top_p", "typ_p", "min_p", "xtc_threshold")
    return [
        replace(case, options=replace(case.options, **{name: value * factor}))
        for name in thresholds
        if 0 < (value := getattr(case.options, name)) < 1
        for factor in (1 - 2e-5, 1 + 2e-5)
    ]


def distribution(case: Case) -> Candidates:
    chain = SamplerChain(case.options, len(case.logits), {})
    return chain.distribution(torch.from_numpy(case.logits), case.history)


MODEL = ROOT / "build/smollm2/f16.gguf"
STOCK = ROOT / "build/smollm2/f16-stock.gguf"
NUM_CASES = 1000
OFF = SamplingOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def logits_of(
    draw: np.random.Generator,
    *,
    has_infinities: bool,
    size: int | None = None,
    scales: tuple[float, ...] = (0.1, 1.0, 3.0, 8.0),
) -> np.ndarray:
    """Flat or peaked logits; one case in four has many ties. With infinities, three in ten have
    -inf in many places, and one in eight in all places but one."""
    size = size or int(draw.choice([1, 2, 5, 37, 300, 2500]))
    logits_V = draw.normal(size=size) * draw.choice(scales)
    if draw.random() < 0.25:
        logits_V = np.round(logits_V)
    if has_infinities and draw.random() < 0.3:
        logits_V[draw.random(size) < 0.6] = -np.inf
        logits_V[draw.integers(size)] = 1.5
    if has_infinities and draw.random() < 0.125:
        logits_V = np.full(size, -np.inf)
        logits_V[draw.integers(size)] = -2.0
    return logits_V.astype(np.float32)


def options(**values) -> SamplingOptions:
    return replace(OFF, **values)


def f32(value: float) -> float:
    """Rounded to f32, so that both sides get the same number."""
    return float(np.float32(value))


def top_k(draw):
    k = int(draw.integers(1, 60))
    return [["top_k", k]], options(top_k=k)


def top_p(draw):
    p, keep = f32(draw.random()), int(draw.integers(0, 4))
    return [["top_p", p, keep]], options(top_p=p, min_keep=keep)


def min_p(draw):
    p, keep = f32(draw.random() ** 2), int(draw.integers(0, 4))
    return [["min_p", p, keep]], options(min_p=p, min_keep=keep)


def typical(draw):
    p, keep = f32(draw.random()), int(draw.integers(0, 4))
    return [["typical", p, keep]], options(typ_p=p, min_keep=keep)


def top_n_sigma(draw):
    n = f32(draw.random() * 3)
    return [["top_n_sigma", n]], options(top_n_sigma=n)


def xtc(draw):
    t = f32(draw.random() * 0.55)
    return [["xtc", 1.0, t, 0, 1]], options(xtc_probability=1.0, xtc_threshold=t)


def xtc_with_min_keep(draw):
    t, keep = f32(draw.random() * 0.55), int(draw.integers(0, 4))
    return [["xtc", 1.0, t, keep, 1]], options(xtc_probability=1.0, xtc_threshold=t, min_keep=keep)


def temperature(draw):
    t = f32(draw.choice([0.0, 0.1, 0.8, 1.0, 2.5]))
    return [["temp", t]], options(temperature=t)


def dynamic_temperature(draw):
    t, spread, exponent = (f32(draw.random() * scale) for scale in (2, 1.5, 3))
    return [["temp_ext", t, spread, exponent]], options(
        temperature=t, dynatemp_range=spread, dynatemp_exponent=exponent
    )


CHOSEN = (top_k, top_p, min_p, typical, top_n_sigma, xtc, xtc_with_min_keep, temperature)
SAMPLERS = {f.__name__: f for f in (*CHOSEN, dynamic_temperature)}
# llama.cpp's float32 sums over more terms would exceed the tolerance of the probabilities.
FEW = ("dynamic_temperature",)
NO_INFINITIES = ("typical", "xtc_with_min_keep", "dynamic_temperature")


def size_of(draw: np.random.Generator, name: str) -> int | None:
    return int(draw.choice([1, 2, 5, 37, 300])) if name in FEW else None


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_sampler_equals_that_of_llama_cpp(tmp_path, name):
    draw = np.random.default_rng(0)
    cases = [
        Case(
            *SAMPLERS[name](draw),
            logits_of(draw, has_infinities=name not in NO_INFINITIES, size=size_of(draw, name)),
        )
        for _ in range(NUM_CASES)
    ]
    wrong = differences(tmp_path, cases)
    assert not wrong, f"{len(wrong)} of {NUM_CASES}, first: {wrong[0]}"


def test_the_comparison_finds_other_candidates(tmp_path):
    """The comparison rejects one candidate more, another temperature, another token."""
    logits_V = np.linspace(-2, 3, 50, dtype=np.float32)
    same = Case([["top_k", 7]], options(top_k=7), logits_V)
    more = Case([["top_k", 7]], options(top_k=8), logits_V)
    warmer = Case([["top_k", 7]], options(top_k=7, temperature=1.001), logits_V)
    another = Case([["top_k", 1]], options(top_k=1, logit_bias=((3, 50.0),)), logits_V)
    wrong = differences(tmp_path, [same, more, warmer, another])
    assert [number for number, _, _ in wrong] == [1, 2, 3]


def with_history(draw, size: int) -> list[int]:
    return draw.integers(0, size, int(draw.integers(0, 120))).tolist()


def test_penalties_equal_those_of_llama_cpp(tmp_path):
    draw = np.random.default_rng(1)
    cases = []
    for _ in range(NUM_CASES):
        logits_V = logits_of(draw, has_infinities=True)
        last_n = int(draw.choice([1, 16, 64]))
        repeat = f32(0.2 + 2 * draw.random())
        frequency, presence = (f32(x) for x in draw.random(2) - 0.3)
        chosen = options(
            repeat_last_n=last_n,
            repeat_penalty=repeat,
            frequency_penalty=frequency,
            presence_penalty=presence,
        )
        chain = [["penalties", len(logits_V), last_n, repeat, frequency, presence]]
        cases.append(Case(chain, chosen, logits_V, with_history(draw, len(logits_V))))
    wrong = differences(tmp_path, cases)
    assert not wrong, f"{len(wrong)} of {NUM_CASES}, first: {wrong[0]}"


def test_logit_bias_equals_that_of_llama_cpp(tmp_path):
    draw = np.random.default_rng(2)
    cases = []
    for _ in range(NUM_CASES):
        logits_V = logits_of(draw, has_infinities=False)
        size = len(logits_V)
        ids = draw.permutation(size)[: int(draw.integers(0, min(size, 6)))].tolist()
        pairs = [[i, -np.inf if draw.random() < 0.3 else f32(3 * draw.normal())] for i in ids]
        bias = tuple((i, value) for i, value in pairs)
        cases.append(Case([["logit_bias", size, pairs]], options(logit_bias=bias), logits_V))
    wrong = differences(tmp_path, cases)
    assert not wrong, f"{len(wrong)} of {NUM_CASES}, first: {wrong[0]}"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.of(ModelFile.load(MODEL))


BREAKERS = (["\n", ":", '"', "*"], [], ["the", "nd "], ["\n\n", "user:"])


@pytest.mark.parametrize("breakers", BREAKERS, ids=repr)
def test_dry_equals_that_of_llama_cpp(tmp_path, codec, breakers):
    """Texts of a few words, so that they repeat, in the vocabulary of a real model."""
    draw = np.random.default_rng(3)
    words = codec.tokenizer.encode(' the cat and a dog: "so\n\nuser: *the* end the\n').ids
    sequences, size, cases = dry_breakers(codec, breakers), codec.tokenizer.get_vocab_size(), []
    for _ in range(40):
        few = draw.permutation(words)[: int(draw.integers(1, 8))]
        history = draw.choice(few, int(draw.integers(0, 150))).tolist()
        multiplier, base = f32(3 * draw.random()), f32(1 + draw.random())
        allowed, last_n = int(draw.integers(0, 4)), int(draw.choice([8, 64, 512]))
        logits_V = np.full(size, -np.inf, np.float32)
        logits_V[sorted(set(words))] = draw.normal(size=len(set(words)))
        chosen = options(
            dry_multiplier=multiplier,
            dry_base=base,
            dry_allowed_length=allowed,
            dry_penalty_last_n=last_n,
            dry_sequence_breakers=tuple(breakers),
        )
        chain = [["dry", multiplier, base, allowed, last_n, breakers]]
        cases.append(Case(chain, chosen, logits_V, history))
    found = ask(tmp_path, cases, model=str(STOCK))
    num_penalised = 0
    for number, case in enumerate(cases):
        chain = SamplerChain(case.options, size, sequences)
        ours = chain.distribution(torch.from_numpy(case.logits), case.history)
        ids, p = found[f"{number}.0.ids"], found[f"{number}.0.p"]
        assert not difference(case.logits, ours, ids, p), (number, case.history)
        plain = chain.distribution(torch.from_numpy(case.logits), [])
        num_penalised += np.abs(plain.probability_A - ours.probability_A).max() > 0.01
    assert num_penalised > 10


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_equals_that_of_llama_cpp(tmp_path, version):
    """Chains of 20 tokens drawn by llama.cpp: its candidates equal ours in more than nine of ten
    steps. A chain ends at the first difference. There the numbers of candidates must be one apart
    (rounding), or 1 in llama.cpp and all in ours (a k above 2 ** 31, which overflows in
    llama.cpp)."""
    draw, cases, num_steps, num_same = np.random.default_rng(4), [], 20, 0
    scales = (1.0, 3.0, 8.0) if version == 1 else (0.1, 1.0, 3.0, 8.0)
    for _ in range(NUM_CASES // num_steps):
        size = int(draw.choice([40, 300, 2500]))
        rows = [
            logits_of(draw, has_infinities=version == 2, size=size, scales=scales)
            for _ in range(num_steps)
        ]
        target, rate, t = f32(5 * draw.random()), f32(draw.random() / 2), f32(0.3 + draw.random())
        mirostat = (
            ["mirostat", size, 1, target, rate, 100]
            if version == 1
            else ["mirostat_v2", 1, target, rate]
        )
        chosen = options(mirostat=version, mirostat_ent=target, mirostat_lr=rate, temperature=t)
        cases.append(Case([["temp", t], mirostat], chosen, np.stack(rows)))
    found = ask(tmp_path, cases, ends=None)
    for number, case in enumerate(cases):
        chain = SamplerChain(case.options, case.logits.shape[1])
        for step, row_V in enumerate(case.logits):
            ours = chain.distribution(torch.from_numpy(row_V), [])
            ids, p = found[f"{number}.{step}.ids"], found[f"{number}.{step}.p"]
            if why := difference(row_V, ours, ids, p):
                # float32 and float64 on either side of a whole number, or the overflow
                sizes = len(ours), int((p > 1e-30).sum())
                assert abs(sizes[0] - sizes[1]) == 1 or sizes == (len(row_V), 1), why
                break
            num_same += 1
            logit = row_V[found[f"{number}.{step}.selected"]]  # another of equal logits may be ours
            chain.accept(int(ours.ids_A[row_V[ours.ids_A] == logit][0]), ours)
    print(f"mirostat {version}: {num_same} steps the same")
    assert num_same > 0.9 * NUM_CASES, num_same


def test_adaptive_p_equals_that_of_llama_cpp(tmp_path):
    """Chains of 20 tokens drawn by llama.cpp."""
    draw, cases, num_steps = np.random.default_rng(7), [], 20
    for _ in range(NUM_CASES // num_steps):
        size = int(draw.choice([40, 300]))
        rows = [draw.normal(size=size) * draw.choice([1.0, 3.0, 8.0]) for _ in range(num_steps)]
        target, decay = f32(draw.random()), f32(0.99 * draw.random())
        chosen = options(adaptive_target=target, adaptive_decay=decay, samplers=("adaptive_p",))
        logits = np.stack(rows).astype(np.float32)
        cases.append(Case([["adaptive_p", target, decay, 1]], chosen, logits))
    found = ask(tmp_path, cases, ends=None)
    for number, case in enumerate(cases):
        chain = SamplerChain(case.options, case.logits.shape[1])
        for step, row_V in enumerate(case.logits):
            ours = chain.distribution(torch.from_numpy(row_V), [])
            theirs = found[f"{number}.{step}.ids"], found[f"{number}.{step}.p"]
            # Adaptive-p's logits change by up to 33 per unit of p, multiplying rounding errors.
            assert not difference(row_V, ours, *theirs, tolerance=1e-4), (number, step)
            chain.accept(int(found[f"{number}.{step}.selected"]), ours)


def test_other_probabilities_of_the_same_tokens_are_not_rounding():
    logits = np.random.default_rng(8).normal(size=40).astype(np.float32)
    case = Case([["typical", 0.7, 0]], options(typ_p=0.7), logits)
    ours = distribution(case)
    ids, p = ours.ids_A.copy(), ours.probability_A.copy()
    assert is_rounding(case, ids, p)
    p[:2] += (0.01, -0.01)
    assert not is_rounding(case, ids, p)
    other = np.setdiff1d(np.arange(len(logits)), ids)[:3]
    assert is_rounding(case, np.append(ids[1:], other[0]), ours.probability_A)
    assert not is_rounding(case, np.append(ids[2:], other[:2]), ours.probability_A)


def llama_cpp_chain(o: SamplingOptions, size: int) -> list[list]:
    """The chain that llama.cpp's common/sampling.cpp makes from these options."""
    penalties = (o.repeat_last_n, o.repeat_penalty, o.frequency_penalty, o.presence_penalty)
    dry = (o.dry_multiplier, o.dry_base, o.dry_allowed_length, o.dry_penalty_last_n)
    made = {
        "penalties": ["penalties", size, *penalties],
        "dry": ["dry", *dry, []],
        "top_n_sigma": ["top_n_sigma", o.top_n_sigma],
        "top_k": ["top_k", o.top_k],
        "typ_p": ["typical", o.typ_p, o.min_keep],
        "top_p": ["top_p", o.top_p, o.min_keep],
        "min_p": ["min_p", o.min_p, o.min_keep],
        "xtc": ["xtc", o.xtc_probability, o.xtc_threshold, o.min_keep, 1],
        "temperature": ["temp_ext", o.temperature, o.dynatemp_range, o.dynatemp_exponent],
    }
    return [made[name] for name in o.samplers]


def random_options(draw: np.random.Generator) -> SamplingOptions:
    """Most samplers are on in half of the cases, in llama.cpp's order or a random one."""

    def maybe(value: float, off: float) -> float:
        return f32(value) if draw.random() < 0.5 else off

    names = SamplingOptions().samplers
    return SamplingOptions(
        temperature=f32(draw.choice([0.0, 0.5, 1.0, 1.7])),
        dynatemp_range=maybe(draw.random(), 0.0),
        top_k=int(draw.choice([0, 5, 40])),
        top_p=maybe(draw.random(), 1.0),
        min_p=maybe(draw.random() / 3, 0.0),
        typ_p=maybe(0.2 + 0.8 * draw.random(), 1.0),
        xtc_probability=float(draw.random() < 0.5),
        xtc_threshold=f32(draw.random() / 3),
        repeat_penalty=maybe(0.8 + draw.random(), 1.0),
        presence_penalty=maybe(draw.random(), 0.0),
        frequency_penalty=maybe(draw.random() / 2, 0.0),
        dry_multiplier=maybe(draw.random(), 0.0),
        dry_sequence_breakers=(),
        min_keep=int(draw.integers(0, 3)),
        samplers=names if draw.random() < 0.5 else tuple(draw.permutation(names).tolist()),
        seed=0,
    )


def test_any_chain_equals_that_of_llama_cpp(tmp_path):
    """Rows without ties or -inf. In llama.cpp, top-n-sigma leaves -inf: it is not combined with
    dynamic temperature, typical-p or min_keep. Dynamic temperature may leave probabilities of 0 in
    float32: it is not combined with typical-p."""
    draw = np.random.default_rng(6)
    cases = []
    for number in range(NUM_CASES):
        size = int(draw.choice([5, 60, 400]))
        logits_V = (draw.normal(size=size) * draw.choice([0.5, 2.0, 5.0])).astype(np.float32)
        chosen = random_options(draw)
        if number % 4 == 0:
            n = f32(3 * draw.random())
            chosen = replace(chosen, top_n_sigma=n, dynatemp_range=0.0, typ_p=1.0, min_keep=0)
        if chosen.dynatemp_range:
            chosen = replace(chosen, typ_p=1.0)
        history = draw.integers(0, min(size, 8), int(draw.integers(0, 80))).tolist()
        cases.append(Case(llama_cpp_chain(chosen, size), chosen, logits_V, history))
    wrong = differences(tmp_path, cases, model=str(STOCK))
    assert not wrong, f"{len(wrong)} of {NUM_CASES}, first: {wrong[0]}"

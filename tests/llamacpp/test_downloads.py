"""Files that people download, as they are: greedy texts of both engines, after `make qwen2.5
gemma3`: `-m slow`.

llama.cpp rounds what it multiplies by blocks of weights to 8-bit integers, ours to 16-bit ones.
What is right is llama.cpp's own arithmetic in f32, on the same weights unpacked: the noise of each
side is how far its logits are from these. A text may differ from llama.cpp's only from an open step
on: one whose two tokens are closer than llama.cpp's noise."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import rel_error

from hotsplit import Engine
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig

BUILD = Path(__file__).parent.parent.parent / "build"
FILES = {
    "qwen2.5": BUILD / "qwen2.5/qwen2.5-0.5b-instruct-q4_k_m.gguf",
    "gemma3": BUILD / "gemma3/gemma-3-270m-q4_k_m.gguf",
}
PROMPTS = [
    "def parse_args(argv=None):",
    "Once upon a time",
    "import numpy as np\n",
    "class Foo",
    "for i in range(10):\n    print(i)\n",
    "The quick brown fox",
    "SELECT name, COUNT(*) FROM",
    "Paris is the capital of",
    "#include <stdio.h>\nint main(",
    "Water boils at a temperature of",
]
NUM_TOKENS = 200
# A logit's error is about normal, and a step compares the errors of two.
OPEN = 4 * 2**0.5  # standard deviations of an error

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Text:
    """llama.cpp's text, ours, and logits before each token of llama.cpp's [T, V]: its own, ours and
    the right ones."""

    theirs: list[int]
    ours: list[int]
    theirs_TV: np.ndarray
    ours_TV: np.ndarray
    right_TV: np.ndarray


def greedy(engine: Engine, ids: list[int]) -> list[int]:
    """Takes the most probable token each time; as in the oracle, the end of a text is a token like
    others."""
    tokens: list[int] = []
    with engine.sequence() as text:
        logits_V = text.extend(ids)[-1]
        while len(tokens) < NUM_TOKENS:
            tokens.append(int(logits_V.argmax()))
            logits_V = text.extend(tokens[-1:])[-1]
    return tokens


def divergence(of_TV: np.ndarray, from_TV: np.ndarray) -> float:
    """Mean KL(from | of) in nats a token."""
    p, q = (torch.from_numpy(x).log_softmax(1) for x in (from_TV, of_TV))
    return float((p.exp() * (p - q)).sum(dim=1).mean())


def texts(llama_cpp, engine: Engine, path: Path, right: Path, folder: Path):
    def logits_of(action: str, **request):
        answer = llama_cpp(action, count=NUM_TOKENS, logits=folder / "logits.npy", **request)
        return answer.get("ids"), np.load(folder / "logits.npy")

    for prompt in PROMPTS:
        ids = engine.codec.encode(prompt)
        theirs, theirs_TV = logits_of("greedy", model=path, prompt=ids, kv_kind="f16")
        whole = ids + theirs[:-1]
        _, right_TV = logits_of("follow", model=right, ids=whole, kv_kind="f32")
        ours_TV = engine.logits(whole)[len(ids) - 1 :].numpy()
        yield (
            prompt,
            Text(
                theirs=theirs,
                ours=greedy(engine, ids),
                theirs_TV=theirs_TV,
                ours_TV=ours_TV,
                right_TV=right_TV,
            ),
        )


def check(text: Text, what: str) -> tuple[int, int, int, int]:
    """(first token that differs, open steps, steps whose best tokens differ, those of them in which
    ours is the right one)."""
    best_TV = np.partition(text.theirs_TV, -2, axis=1)[:, -2:]
    noise_T = OPEN * np.std(text.theirs_TV - text.right_TV, axis=1)
    is_open_T = best_TV[:, 1] - best_TV[:, 0] < noise_T
    best_T = text.ours_TV.argmax(axis=1)
    differs_T = best_T != np.array(text.theirs)
    assert not (differs_T & ~is_open_T).any(), (what, np.flatnonzero(differs_T & ~is_open_T))
    pairs = enumerate(zip(text.ours, text.theirs, strict=True))
    first = next((t for t, (ours, theirs) in pairs if ours != theirs), NUM_TOKENS)
    assert first == (int(differs_T.argmax()) if differs_T.any() else NUM_TOKENS)
    if first < NUM_TOKENS:
        ours, theirs = text.ours[first], text.theirs[first]
        by = (
            x_TV[first, theirs] - x_TV[first, ours]
            for x_TV in (text.theirs_TV, text.ours_TV, text.right_TV)
        )
        print(
            f"{what}: token {first} differs; the logit of llama.cpp's is larger than that of ours"
            " by"
            " {:.3f} in llama.cpp, by {:.3f} in ours, by {:.3f} in f32;".format(*by),
            f"noise {noise_T[first]:.3f}",
        )
    is_right_T = best_T == text.right_TV.argmax(axis=1)
    return first, int(is_open_T.sum()), int(differs_T.sum()), int((differs_T & is_right_T).sum())


@pytest.mark.parametrize("name", FILES)
def test_texts_are_those_of_llama_cpp(llama_cpp, tmp_path, name):
    path, right = FILES[name], tmp_path / "f32.gguf"
    assert path.exists(), f"{path} is missing: run make {name} first"
    convert(ConvertConfig(source=path, output=right, layout="stock", outtype="f32"))
    counts, errors, kls = [], [], []
    with Engine.load(path, mode="dense", device="cpu", context_length=256) as engine:
        for prompt, text in texts(llama_cpp, engine, path, right, tmp_path):
            counts.append(check(text, f"{name} {prompt!r}"))
            pairs = (
                (text.ours_TV, text.right_TV),
                (text.theirs_TV, text.right_TV),
                (text.ours_TV, text.theirs_TV),
            )
            errors.append([rel_error(a_TV, b_TV) for a_TV, b_TV in pairs])
            kls.append([divergence(a_TV, b_TV) for a_TV, b_TV in pairs])
    first, num_open, num_differing, num_right = zip(*counts, strict=True)
    error, kl = np.mean(errors, axis=0), np.mean(kls, axis=0)
    print(
        f"{name}: {sum(t == NUM_TOKENS for t in first)} of {len(PROMPTS)} texts are the same; of"
        f" {NUM_TOKENS * len(PROMPTS)} steps {sum(num_open)} are open, {sum(num_differing)} have"
        f" another best token, of which ours is the one of f32 in {sum(num_right)}; logits from"
        f" f32: ours {error[0]:.1e}, llama.cpp's {error[1]:.1e}, from each other {error[2]:.1e}; KL"
        f" {kl[0]:.1e}, {kl[1]:.1e}, {kl[2]:.1e} nats a token"
    )
    assert error[0] < error[1] and kl[0] < kl[1], "llama.cpp's 8 bits are not nearer to f32"
    assert sum(num_open) < NUM_TOKENS * len(PROMPTS) / 2, "too few steps are decided"

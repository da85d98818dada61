"""Our files in llama.cpp, and files of its quantiser in our runtime, give the same numbers.

Both engines continue the same prompts greedily; the logits before every token are compared.
llama.cpp rounds activations to f16 for f16 matrices and to 8-bit integers for quantised ones, where
ours keeps f32 and 16-bit integers. The logits of the two best tokens may be closer than that noise:
such a step is *open*, and counted."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from checkpoints import edit_config
from reference import rel_error

from hotsplit import Engine
from hotsplit.artifacts.importance_file import Importance, Importances
from hotsplit.artifacts.model_file import TOKENIZER_KEY, ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.convert.type_mixtures import NAMES, main_type
from hotsplit.errors import HotsplitError
from hotsplit.model.weight_types import BY_NAME

BUNDLED = Path(__file__).parent.parent.parent / "examples/tiny-relu"
PROMPTS = ["def parse_args(argv=None):", "Once upon a time", "import numpy as np\n", "class Foo"]
PROMPTS += ["for i in range(10):\n    print(i)\n", "The quick brown fox"]
NUM_TOKENS = 64
# |ours - theirs| / |theirs|; measured maxima: 5e-7, 3.3e-4, 2e-3, 8.3e-3, 1.1e-2.
BOUNDS = {"f32": 5e-6, "f16": 1e-3, "bf16": 5e-3, "q8_0": 2e-2, "q4_0": 3e-2}
MIXTURES = [name for name in NAMES if main_type(name) in BY_NAME]
# K-quants: 1.2e-2 to 1.7e-2. Files that people download are mixtures of them.
K_BOUNDS = {"q4_k_m": 3e-2, "q5_k_m": 3e-2, "q4_k": 3e-2, "q5_k": 3e-2, "q6_k": 3e-2}
# The types that are in a file of these names, of matrices whose rows are whole blocks of 256.
LOW_BITS = {
    "iq1_s": {"iq1_s", "iq2_xxs"},
    "iq1_m": {"iq1_m", "iq2_xxs"},
    "iq2_xxs": {"iq2_xxs"},
    "iq2_xs": {"iq2_xs"},
    "iq2_s": {"iq2_xs", "iq3_s"},
    "iq2_m": {"iq2_s", "iq3_s"},
    "iq3_xxs": {"iq3_xxs", "iq2_s", "iq3_s"},
    "iq3_s": {"iq3_s"},
    "tq1_0": {"tq1_0"},
    "tq2_0": {"tq2_0"},
    "q2_0": {"q2_0"},
    "q1_0": {"q1_0"},
}
LOW_BIT_BOUND = 5e-2
ROUNDED_INPUTS = 1e-3  # of what 16 bits of the inputs' values cost


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A prompt, each side's continuation, and both sides' logits before each of llama.cpp's 64
    tokens [64, V]."""

    prompt: list[int]
    theirs: list[int]
    ours: list[int]
    logits_theirs: np.ndarray
    logits_ours: np.ndarray


@pytest.fixture(scope="session")
def silu(tmp_path_factory) -> Path:
    """The bundled checkpoint with SiLU instead of ReLU: its text is nonsense, its numbers are
    sound."""
    folder = tmp_path_factory.mktemp("silu") / "c"
    shutil.copytree(BUNDLED, folder)
    edit_config(folder, lambda values: values.update(hidden_act="silu"))
    return folder


@pytest.fixture(scope="session")
def stock(silu, tmp_path_factory):
    """stock("q8_0"): the checkpoint in the layout of llama.cpp, written by us."""
    folder = tmp_path_factory.mktemp("stock")

    def make(kind: str) -> Path:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            convert(ConvertConfig(source=silu, output=path, layout="stock", outtype=kind))
        return path

    return make


@pytest.fixture(scope="session")
def quantised(stock, llama_cpp, tmp_path_factory):
    """quantised("q8_0"): our f32 file, quantised by llama.cpp; without our tokenizer key, so that
    text is tokenised by llama.cpp's keys."""
    folder = tmp_path_factory.mktemp("quantised")

    def make(kind: str) -> Path:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            source = folder / "source.gguf"
            without_tokenizer_json(stock("f32"), source)
            llama_cpp("quantize", source=source, target=path, kind=kind)
        return path

    return make


def without_tokenizer_json(source: Path, target: Path) -> None:
    model = ModelFile.load(source)
    del model.extra_keys[TOKENIZER_KEY]
    model.save(target)


def continuations(llama_cpp, path: Path, folder: Path, ours: Path | None = None):
    """Continuations, with `path` in llama.cpp and `ours` (by default the same file) in our
    runtime."""
    kv_kind = "f32" if ModelFile.load(path).tensors["token_embd.weight"].kind == "f32" else "f16"
    with Engine.load(ours or path, mode="dense", device="cpu") as engine:
        for prompt in PROMPTS:
            ids = engine.codec.encode(prompt)
            given = {"count": NUM_TOKENS, "kv_kind": kv_kind, "logits": folder / "logits.npy"}
            theirs = llama_cpp("greedy", model=path, prompt=ids, **given)["ids"]
            logits_TV = engine.logits(ids + theirs[:-1])[len(ids) - 1 :].numpy()
            tokens = [token.id for token in engine.generate(ids, NUM_TOKENS, temperature=0.0)]
            yield Continuation(
                prompt=ids,
                theirs=theirs,
                ours=tokens,
                logits_theirs=np.load(folder / "logits.npy"),
                logits_ours=logits_TV,
            )


def check(found: Continuation, bound: float) -> tuple[float, int]:
    """(relative error of the logits, open steps); the texts are the same up to an open step."""
    error, is_open_T, differs_T = check_steps(found, bound)
    same = int(np.flatnonzero(differs_T)[0]) if differs_T.any() else NUM_TOKENS
    assert found.ours[:same] == found.theirs[: min(same, len(found.ours))]
    assert len(found.ours) >= same, "ended early"
    return error, int(is_open_T.sum())


def check_steps(found: Continuation, bound: float) -> tuple[float, np.ndarray, np.ndarray]:
    """(relative error of the logits, open steps, steps at which the two prefer other tokens).

    A step is open if llama.cpp's two best logits are closer than 4 * bound * RMS, where RMS is the
    root mean square of its logits at that step; otherwise it is decided."""
    error = rel_error(found.logits_ours, found.logits_theirs)
    assert error < bound, error
    best_TV = np.sort(found.logits_theirs, axis=1)
    noise_T = 4 * bound * np.sqrt((found.logits_theirs**2).mean(axis=1))
    is_open_T = best_TV[:, -1] - best_TV[:, -2] < noise_T
    differs_T = found.logits_ours.argmax(axis=1) != np.array(found.theirs)
    assert not (differs_T & ~is_open_T).any(), np.flatnonzero(differs_T & ~is_open_T)
    return error, is_open_T, differs_T


def check_all(llama_cpp, path: Path, folder: Path, kind: str, what: str) -> None:
    results = [check(c, (BOUNDS | K_BOUNDS)[kind]) for c in continuations(llama_cpp, path, folder)]
    errors, is_open = zip(*results, strict=True)
    steps = NUM_TOKENS * len(PROMPTS)
    print(f"{what} {kind}: logits {max(errors):.1e} apart at most, {sum(is_open)} of {steps} open")
    assert sum(is_open) < steps / 2, "too few steps are decided to say anything"
    if kind == "f32":
        assert sum(is_open) == 0, "the strict comparison must decide every step"


@pytest.mark.parametrize("kind", [*BOUNDS, "q4_k", "q5_k", "q6_k"])
def test_our_file_in_llama_cpp(llama_cpp, stock, tmp_path, kind):
    check_all(llama_cpp, stock(kind), tmp_path, kind, "ours")


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k"])
def test_llama_cpps_file_in_our_runtime(llama_cpp, quantised, tmp_path, kind):
    path = quantised(kind)
    assert TOKENIZER_KEY not in ModelFile.load(path).extra_keys
    check_all(llama_cpp, path, tmp_path, kind, "llama.cpp's")


@pytest.mark.parametrize("kind", LOW_BITS)
def test_its_files_of_one_to_three_bits_run_as_they_are(llama_cpp, stock, tmp_path, kind):
    """With importances, in its mixtures. Ours is also compared with the file's values in f32."""
    source, path, exact = stock("f32"), tmp_path / "q.gguf", tmp_path / "f32.gguf"
    made, arrays = importances_of(source, tmp_path / "i.gguf"), tmp_path / "i.npz"
    np.savez(arrays, **{name: each.means().reshape(-1) for name, each in made.tensors.items()})
    llama_cpp("quantize", source=source, target=path, kind=kind, importances=arrays)
    kinds = {entry.in_file.kind for entry in ModelFile.load(path).tensors.values()}
    assert LOW_BITS[kind] <= kinds, kinds
    convert(ConvertConfig(source=path, output=exact, outtype="f32", layout="stock"))
    with Engine.load(exact, mode="dense", device="cpu") as engine:
        for found in continuations(llama_cpp, path, tmp_path):
            check_steps(found, LOW_BIT_BOUND)  # texts of so few bits end early
            ids = found.prompt + found.theirs[:-1]
            exact_TV = engine.logits(ids)[len(found.prompt) - 1 :].numpy()
            assert rel_error(found.logits_ours, exact_TV) < ROUNDED_INPUTS


def test_a_mixture_of_k_quants_converts_with_its_bytes(llama_cpp, quantised, tmp_path):
    """Every tensor keeps its type and bytes, except the down projections, which are transposed and
    become q8_0. The logits agree with llama.cpp's."""
    path, ours = quantised("q4_k_m"), tmp_path / "m.gguf"
    report = convert(ConvertConfig(source=path, output=ours))
    old, new = ModelFile.load(path).tensors, ModelFile.load(ours).tensors
    kinds = {entry.kind for entry in old.values()}
    assert {"q4_k", "q6_k"} <= kinds, kinds
    for name, entry in new.items():
        if "ffn_down_t" in name:
            assert entry.kind == "q8_0"
        else:
            assert entry.kind == old[name].kind
            assert np.array_equal(entry.read(), old[name].read())
    assert report.outtype == "q4_k_m" and any("repacked as q8_0" in n for n in report.notes)
    for found in continuations(llama_cpp, path, tmp_path, ours):
        check(found, K_BOUNDS["q4_k_m"])


def test_the_check_rejects_other_numbers(llama_cpp, stock, silu, tmp_path):
    """llama.cpp's SiLU against the ReLU of the same weights, and q4_0 against f32."""
    relu = tmp_path / "relu.gguf"
    convert(ConvertConfig(source=BUNDLED, output=relu, outtype="f32"))
    for ours, bound in ((relu, BOUNDS["q4_0"]), (stock("q4_0"), BOUNDS["f32"])):
        found = next(continuations(llama_cpp, stock("f32"), tmp_path, ours))
        with pytest.raises(AssertionError):
            check(found, bound)


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k"])
def test_bytes_equal_those_of_llama_cpps_quantiser(stock, quantised, kind):
    ours, theirs = ModelFile.load(stock(kind)), ModelFile.load(quantised(kind))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, entry in ours.tensors.items():
        other = theirs.tensors[name]
        assert (entry.kind, entry.shape) == (other.kind, other.shape), name
        a, b = (tensor.read().reshape(-1).view(np.uint8) for tensor in (entry, other))
        assert np.array_equal(a, b), f"{name}: {(a != b).sum()} of {a.size} bytes differ"
    print(f"{kind}: {len(ours.tensors)} tensors are equal to the byte")


@pytest.mark.parametrize("has_importances", [False, True])
@pytest.mark.parametrize("kind", [*MIXTURES, "iq4_nl", "q5_0"])
def test_mixtures_and_searched_bytes_equal_those_of_its_quantiser(
    llama_cpp, silu, stock, tmp_path, kind, has_importances
):
    """The types of all tensors, and their bytes."""
    source, target, ours = stock("f32"), tmp_path / "t.gguf", tmp_path / "o.gguf"
    made, arrays = importances_of(source, tmp_path / "i.gguf"), tmp_path / "i.npz"
    np.savez(arrays, **{name: each.means().reshape(-1) for name, each in made.tensors.items()})
    given = {"importances": arrays} if has_importances else {}
    llama_cpp("quantize", source=source, target=target, kind=kind, **given)
    options = {"layout": "stock", "importances": made.path if has_importances else None}
    convert(ConvertConfig(source=silu, output=ours, outtype=kind, **options))
    theirs = ModelFile.load(target).tensors
    for name, entry in ModelFile.load(ours).tensors.items():
        assert entry.kind == theirs[name].kind, name
        assert entry.read().tobytes() == theirs[name].read().tobytes(), name


def importances_of(model: Path, path: Path) -> Importances:
    random = np.random.default_rng(0)
    matrices = {
        name: entry
        for name, entry in ModelFile.load(model).tensors.items()
        if name.startswith("blk.") and len(entry.shape) == 2
    }
    tensors = {
        name: Importance(
            np.exp(random.standard_normal(entry.shape[-1])).astype(np.float32),
            np.ones(1, np.float32),
        )
        for name, entry in matrices.items()
    }
    made = Importances(path=path, tensors=tensors)
    made.save(path)
    return made


def test_files_that_would_run_wrongly_are_refused_on_both_sides(llama_cpp, silu, stock, tmp_path):
    with pytest.raises(HotsplitError, match="graph computes SiLU, this model is relu"):
        convert(ConvertConfig(source=BUNDLED, output=tmp_path / "r.gguf", layout="stock"))
    assert llama_cpp("why_not", model=stock("f16"))["loaded"]
    for source in (BUNDLED, silu):
        path = tmp_path / f"{source.name}.gguf"
        convert(ConvertConfig(source=source, output=path, layout="sparse"))
        answer = llama_cpp("why_not", model=path)
        assert not answer["loaded"] and "tensor 'blk.0.ffn_down.weight' not found" in answer["log"]


def test_llama_cpp_has_the_pinned_version(llama_cpp):
    about = llama_cpp("about")
    print(f"llama-cpp-python {about['version']}; {about['system']}")
    pins = (Path(__file__).parent / "requirements.txt").read_text()
    assert f"llama-cpp-python=={about['version']}\n" in pins

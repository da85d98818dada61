"""Products over several tokens: tiles of f32 and bf16, with the C++ kernels and without, whole and
chosen rows, neurons in parts."""

import gguf
import numpy as np
import pytest
import torch
from models import make_model, make_shape

from sparkinfer.budget import PREFILL_CHUNK, SHORT_CHUNK, part_neurons, tile_rows
from sparkinfer.errors import SparkinferError
from sparkinfer.runtime import feed_forward, matrix, tiles
from sparkinfer.runtime.engine import Engine
from sparkinfer.runtime.kernels.cpu import library
from sparkinfer.runtime.matrix import Matrix

KINDS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": None,
         "q4_0": None}  # fmt: skip
T, N, D = 5, 700, 96
WRONG = [torch.zeros_like, lambda y: 0.5 * y, lambda y: y.flip(0)]


@pytest.fixture(params=["f32", "bf16", "torch"])
def tile(request, monkeypatch):
    """Type of the tiles; "torch" is without the kernels."""
    if request.param == "torch":
        monkeypatch.setattr(library, "_lib", None)
    monkeypatch.setenv(tiles.TILES_VARIABLE, "f32" if request.param == "torch" else request.param)
    monkeypatch.setattr(matrix, "tile_rows", lambda width: 256)  # three tiles
    tiles._processors_choice.cache_clear()
    yield request.param
    tiles._processors_choice.cache_clear()


def random_matrix(kind: str) -> tuple[Matrix, torch.Tensor]:
    """A matrix and its numbers in f64."""
    dense_ND = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    if KINDS[kind] is not None:
        data = dense_ND.to(KINDS[kind])
        return Matrix(data=data, kind=kind, width=D), data.double()
    quant = gguf.GGMLQuantizationType[kind.upper()]
    raw = gguf.quants.quantize(dense_ND.numpy(), quant)
    exact = torch.from_numpy(gguf.quants.dequantize(raw, quant)).double()
    return Matrix(data=torch.from_numpy(raw), kind=kind, width=D), exact


def is_right(got, left, right, eps) -> bool:
    """Whether got is left @ right for factors and sums rounded by eps (f32: each of n terms)."""
    bound = eps * (left.abs().double() @ right.abs())
    return bool(((got.double() - left.double() @ right).abs() <= bound).all())


def eps_of(tile: str, kind: str, count: int) -> float:
    # Both factors and the sums of three tiles are rounded to 8 bits.
    is_bf16 = tile == "bf16" and kind != "f32"
    return 5 * 2**-8 if is_bf16 else count * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("kind", KINDS)
def test_products_over_several_tokens(tile, kind):
    W, exact_ND = random_matrix(kind)
    generator = torch.Generator().manual_seed(1)
    for index_A in (None, torch.arange(N - 1, -1, -3), torch.arange(0)):
        rows_AD = exact_ND if index_A is None else exact_ND[index_A]
        x_TD = torch.randn(T, D, generator=generator)
        weight_TA = torch.randn(T, len(rows_AD), generator=generator)
        product = W.product(x_TD, index_A)
        combined = W.combine_many(weight_TA, index_A)
        assert product.shape == (T, len(rows_AD)) and combined.shape == (T, D)
        assert product.dtype == combined.dtype == torch.float32
        assert is_right(product, x_TD, rows_AD.T, eps_of(tile, kind, D))
        assert is_right(combined, weight_TA, rows_AD, eps_of(tile, kind, N))


@pytest.mark.parametrize("wrong", WRONG)
def test_the_measure_rejects_wrong_products(tile, wrong):
    W, exact_ND = random_matrix("f16")
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    assert not is_right(wrong(W.product(x_TD)), x_TD, exact_ND.T, eps_of(tile, "f16", D))


def test_rows_that_lie_apart(tile):
    W, _ = random_matrix("q8_0")
    wide = torch.cat([W.data, W.data], dim=1)[:, : W.data.shape[1]]
    x_TD = torch.randn(T, D)
    apart = Matrix(data=wide, kind="q8_0", width=D)
    assert torch.equal(apart.product(x_TD), W.product(x_TD))
    index_A = torch.tensor([5, 699, 5])
    assert torch.equal(apart.product(x_TD, index_A), W.product(x_TD, index_A))


def test_a_part_is_whole_tiles():
    for width in (1, 256, 2048, 8192):
        for num_tokens in (1, 2, 128, 512):
            rows = part_neurons(width, num_tokens)
            assert rows >= tile_rows(width) and rows % tile_rows(width) == 0


@pytest.fixture(scope="module", params=["f16", "q8_0"])
def model_path(request, tmp_path_factory):
    shape = make_shape(num_layers=2, width=64, num_neurons=3000, vocab_size=50, context_length=600)
    model = make_model(shape=shape, kind=request.param, predictor_rank=16, predictor_density=0.2)
    path = tmp_path_factory.mktemp("tiles") / "m.gguf"
    model.save(path)
    return path


@pytest.mark.parametrize("num_tokens", [2, 3, 40, 513])
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_parts_and_chosen_rows_give_what_all_rows_give(model_path, mode, num_tokens, monkeypatch):
    """Watched, all rows of all neurons are computed at once, in passes of 128 tokens."""
    monkeypatch.setattr(feed_forward, "part_neurons", lambda width, num_tokens: 1024)
    ids = np.arange(num_tokens) % 50
    with Engine.load(model_path, mode=mode, device="cpu") as engine:
        got = engine.logits(ids)
        with engine.observe(lambda name, layer, tensor: None):
            want = engine.logits(ids)
        difference = (got - want).norm() / want.norm()
        # The cache of keys is f16, and a score near the threshold may fall to its other side.
        assert difference < 3e-3, difference
        assert (got.flip(0) - want).norm() / want.norm() > 1e-2 or num_tokens == 2


def test_who_watches_sees_short_passes(model_path):
    seen = []
    with Engine.load(model_path, device="cpu") as engine:
        assert engine._live.most_tokens == PREFILL_CHUNK
        with engine.observe(lambda name, layer, tensor: seen.append(len(tensor)),
                            lambda name, layer: name == "embedding"):  # fmt: skip
            engine.hidden(np.zeros(300, dtype=np.int64))
    assert seen == [SHORT_CHUNK, SHORT_CHUNK, 300 - 2 * SHORT_CHUNK]


def test_few_tokens_read_only_rows_that_one_of_them_needs(model_path):
    with Engine.load(model_path, mode="predicted", device="cpu") as engine:
        engine.hidden(np.arange(2))
        few = engine.traffic.gate
        engine.hidden(np.arange(512) % 50)
        assert 0 < few < (engine.traffic.gate - few)


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.delenv(tiles.TILES_VARIABLE, raising=False)
    tiles._processors_choice.cache_clear()
    yield monkeypatch
    tiles._processors_choice.cache_clear()


def test_a_processor_without_bf16_takes_f32(fresh):
    fresh.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": False})
    assert tiles.tile_dtype("f16") == torch.float32


@pytest.mark.parametrize("factor, want", [(4.0, torch.bfloat16), (1.1, torch.float32)])
def test_bf16_must_be_faster(fresh, factor, want):
    fresh.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    fresh.setattr(tiles, "_survives_bf16", lambda: True)
    fresh.setattr(tiles, "_seconds", lambda dtype: 1.0 if dtype == torch.bfloat16 else factor)
    assert tiles.tile_dtype("q8_0") == want
    assert tiles.tile_dtype("f32") == torch.float32  # always


@pytest.mark.parametrize("is_right", [lambda: False, lambda: torch.ones(1)[9]])
def test_bf16_that_fails_is_not_used(fresh, is_right, capfd):
    fresh.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    fresh.setattr(tiles, "_is_right", is_right)
    assert tiles.tile_dtype("f16") == torch.float32
    assert "bf16 products but they fail here; using f32" in capfd.readouterr().err


def test_the_trial_passes_here():
    assert tiles._is_right() and tiles._survives_bf16()


def test_nonsense_in_the_environment_is_refused(fresh):
    fresh.setenv(tiles.TILES_VARIABLE, "fp8")
    with pytest.raises(SparkinferError, match="PREFILL_TILES='fp8': must be one of f32"):
        tiles.tile_dtype("f16")


def test_it_is_refused_before_there_is_a_prompt(fresh, tmp_path):
    make_model(path=tmp_path / "m.gguf").save(tmp_path / "m.gguf")
    fresh.setenv(tiles.TILES_VARIABLE, "")
    with pytest.raises(SparkinferError, match="PREFILL_TILES='': must be one of f32"):
        Engine.load(tmp_path / "m.gguf")

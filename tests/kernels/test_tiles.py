"""Products over several tokens: whole and chosen rows, neurons in parts."""

import gguf
import numpy as np
import pytest
import torch
from models import decided_predictors, make_model, make_sizes
from test_cpu_kernels import rounded

from hotsplit.costs.pass_length import SHORT_CHUNK
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.ops.structs import MAX_ROWS
from hotsplit.runtime.weights import matrix
from hotsplit.runtime.weights.matrix import Matrix

KINDS = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "q8_0": None,
    "q4_0": None,
}
T, N, D = 5, 700, 96
WRONG = [torch.zeros_like, lambda y: 0.5 * y, lambda y: y.flip(0)]


@pytest.fixture
def three_tiles(monkeypatch):
    monkeypatch.setattr(matrix, "tile_rows", lambda width: 256)


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
    """True if no value of got is off left @ right by more than eps times |left| @ |right|."""
    bound = eps * (left.abs().double() @ right.abs())
    return bool(((got.double() - left.double() @ right).abs() <= bound).all())


EPS = torch.finfo(torch.float32).eps


@pytest.mark.usefixtures("three_tiles")
@pytest.mark.parametrize("kind", KINDS)
def test_products_over_several_tokens(kind):
    W, exact_ND = random_matrix(kind)
    generator = torch.Generator().manual_seed(1)
    for index_A in (None, torch.arange(N - 1, -1, -3), torch.arange(0)):
        rows_AD = exact_ND if index_A is None else exact_ND[index_A]
        x_TD = torch.randn(T, D, generator=generator)
        product = W.product(x_TD, index_A)
        assert product.shape == (T, len(rows_AD)) and product.dtype == torch.float32
        # The kernels quantise x to 16 bits, each block of 32 values by its largest.
        eps = 2**-12 if kind in ("q8_0", "q4_0") else D * EPS
        assert is_right(product, rounded(kind, x_TD), rows_AD.T, eps)
    weight_TN = torch.randn(T, N, generator=generator)
    combined = W.combine_many(weight_TN)
    assert combined.shape == (T, D) and combined.dtype == torch.float32
    assert is_right(combined, weight_TN, exact_ND, N * EPS)


@pytest.mark.usefixtures("three_tiles")
@pytest.mark.parametrize("wrong", WRONG)
def test_the_bound_rejects_wrong_products(wrong):
    W, exact_ND = random_matrix("f16")
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    assert not is_right(wrong(W.product(x_TD)), x_TD, exact_ND.T, D * EPS)


@pytest.fixture(scope="module", params=["f16", "q8_0"])
def model_path(request, tmp_path_factory):
    shape = make_sizes(num_layers=2, width=64, num_neurons=3000, vocab_size=50, context_length=600)
    model = make_model(sizes=shape, kind=request.param, predictor_rank=16, predictor_density=0.2)
    model.tensors.update(decided_predictors(2, 3000))
    path = tmp_path_factory.mktemp("tiles") / "m.gguf"
    model.save(path)
    return path


def test_observers_see_short_passes(model_path):
    seen = []
    with Engine.load(model_path, device="cpu") as engine:
        assert engine._live.most_tokens == MAX_ROWS
        with engine.observe(
            lambda name, layer, tensor: seen.append(len(tensor)),
            lambda name, layer: name == "embedding",
        ):
            engine.hidden(np.zeros(300, dtype=np.int64))
    assert seen == [SHORT_CHUNK, SHORT_CHUNK, 300 - 2 * SHORT_CHUNK]


def test_few_tokens_read_only_the_rows_that_any_of_them_needs(model_path):
    with Engine.load(model_path, mode="predicted", device="cpu") as engine:
        engine.hidden(np.arange(2))
        few = engine.traffic.gate
        engine.hidden(np.arange(512) % 50)
        assert 0 < few < (engine.traffic.gate - few)

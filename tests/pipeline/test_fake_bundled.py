"""The bundled model in mode predicted on a fake CUDA device, which holds half of each layer's
neurons: PTX, host functions and a captured graph are executed together."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from fake_cuda import library
from fake_cuda.ptx_kernels import StreamedPtx
from fake_cuda.torch_cuda import fake_cuda
from hybrid_plans import stepped
from paths import ROOT
from reference import assert_rows_agree
from test_native_step import BOUNDS
from test_runtime import make_split

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.profile_file import Profile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.profile.collect import profile
from hotsplit.profile.profile_config import ProfileConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not library.can_be_built(), reason="needs a C++ compiler, and Linux"),
]
TINY = ROOT / "examples" / "tiny-relu"
TOKENS = [11, 250, 7, 301]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A folder with the model and its predictors, and a plan that puts the hotter half of each
    layer's neurons on a GPU."""
    folder = tmp_path_factory.mktemp("bundled")
    subprocess.run(
        [sys.executable, TINY / "bundled_corpus.py", "--part", "train", "-o", folder / "train.txt"],
        check=True,
    )
    convert(ConvertConfig(source=TINY, output=folder / "base.gguf"))
    profile(
        ProfileConfig(
            model=folder / "base.gguf",
            corpora=(folder / "train.txt",),
            output=folder / "profile",
            train_predictors=folder,
            max_tokens=8192,
        )
    )
    convert(ConvertConfig(source=folder / "base.gguf", output=folder / "m.gguf", predictors=folder))
    model = ModelFile.load(folder / "m.gguf")
    frequency_LF = Profile.load(folder / "profile").frequency_LF
    hot = [np.argsort(-frequency_F)[: len(frequency_F) // 2] for frequency_F in frequency_LF]
    make_split(model, hot).save(folder / "s.gguf")
    return folder


def test_executed_ptx_gives_the_bundled_models_logits(planned, monkeypatch):
    monkeypatch.setenv("HOTSPLIT_CACHE", str(planned / "cache"))
    options = {"split": planned / "s.gguf", "mode": "predicted", "device": "cuda"}
    with Engine.load(planned / "m.gguf", mode="predicted", device="cpu") as engine:
        want = stepped(engine, TOKENS)
    with fake_cuda(), Engine.load(planned / "m.gguf", **options) as engine:
        by_reference = stepped(engine, TOKENS)  # this load checks the device, the next one does not
    ptx = StreamedPtx(80)
    with (
        fake_cuda(kernels=ptx.kernels) as cuda,
        Engine.load(planned / "m.gguf", **options) as engine,
    ):
        assert len(cuda.graphs) == 1
        before = len(library.text("log"))
        got = stepped(engine, TOKENS)
        log = library.text("log")[before:]
    assert not library.text("violations")
    num_layers = len(ModelFile.load(planned / "m.gguf").threshold_L)
    assert log.count("host function") == log.count("gate_up") == num_layers * len(TOKENS)
    print(
        f"{len(log) // len(TOKENS)} operations a token,"
        f" {sum(ptx.num_lane_instructions.values()):,} instructions of threads"
    )
    assert_rows_agree(got, want, BOUNDS["f16"])
    assert_rows_agree(got, by_reference, BOUNDS["f16"])
    assert not torch.equal(got, by_reference)  # summed in another order, so the PTX was executed


def test_the_bound_rejects_dense_logits(planned):
    """Dense logits differ by the neurons that the predictors leave out."""
    with Engine.load(planned / "m.gguf", mode="dense", device="cpu") as engine:
        dense = stepped(engine, TOKENS)
    with Engine.load(planned / "m.gguf", mode="predicted", device="cpu") as engine:
        want = stepped(engine, TOKENS)
    with pytest.raises(AssertionError):
        assert_rows_agree(dense, want, BOUNDS["f16"])

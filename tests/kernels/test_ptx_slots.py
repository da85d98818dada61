"""Runs the tests of the neuron cache's GPU kernels with the kernels executed as PTX."""

import pytest
import torch
from ptx.kernels import PtxKernels
from test_gpu_slots import *  # noqa: F403

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the device instead"),
]


@pytest.fixture(scope="module", params=(89, 90, 120), ids=lambda arch: f"sm_{arch}")
def kernels(request):
    return PtxKernels(request.param).kernels

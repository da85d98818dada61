"""Runs the tests of the sorting of a pass's pairs with the kernel executed as PTX."""

import pytest
import torch
from ptx.kernels import PtxKernels
from test_gpu_sorting import *  # noqa: F403

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the device instead"),
]


@pytest.fixture(scope="module", params=(89, 90, 120), ids=lambda arch: f"sm_{arch}")
def kernels(request):
    return PtxKernels(request.param).kernels

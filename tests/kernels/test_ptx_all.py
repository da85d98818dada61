"""Runs the GPU kernels' own tests, which compare them with float64 and rows of a step with rows
alone, with the kernels compiled for three architectures and executed as PTX. sm_89 stands for sm_80
and 86 too: except for the target, Triton generates the same PTX for them."""

import pytest
import torch
from ptx.kernels import PtxKernels
from test_gpu_attention import *  # noqa: F403
from test_gpu_experts import *  # noqa: F403
from test_gpu_kernels import *  # noqa: F403
from test_gpu_neurons import *  # noqa: F403
from test_gpu_slots import *  # noqa: F403
from test_gpu_sorting import *  # noqa: F403

ARCHITECTURES = (89, 90, 120)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("several_rows"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the device instead"),
]


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
def kernels(request):
    return PtxKernels(request.param).kernels

"""What kernels of hidden states with several planes compute (model/planes.py): their float64 reference.

Letters: see kernels.py; P planes, Q = P P, X = P D. A row's planes follow one another, the active one first."""

from torch import Tensor

from hotsplit.runtime.kernels.gpu.own_kernels import own_kernel

TRITON = "hotsplit.runtime.kernels.gpu.planes"


@own_kernel(TRITON, reads=("choice_P", "x_X"), writes=("x_X", "active_D"))
def predict_planes(choice_P: Tensor, mix_QP: Tensor, x_X: Tensor, active_D: Tensor) -> None:
    """x_i += the sum over j of (C r)_ij x_j, with the mix C and the router's choice r; active = x_0."""
    x_PD = x_X.double().view(len(choice_P), -1)
    mix_PP = (mix_QP.double() @ choice_P.double()).view(len(choice_P), -1)
    found_PD = x_PD + mix_PP @ x_PD
    x_X.copy_(found_PD.flatten())
    active_D.copy_(found_PD[0])


@own_kernel(TRITON, reads=("choice_P", "x_X", "active_D"), writes=("x_X", "active_D"))
def correct_planes(
    choice_P: Tensor, mix_PP: Tensor, scale_D: Tensor, x_X: Tensor, active_D: Tensor
) -> None:
    """x_i += (1 + (C r)_i) (active - x_0); active = scale * x_0."""
    x_PD = x_X.double().view(len(choice_P), -1)
    share_P = 1.0 + mix_PP.double() @ choice_P.double()
    found_PD = x_PD + share_P[:, None] * (active_D - x_PD[0])
    x_X.copy_(found_PD.flatten())
    active_D.copy_(found_PD[0] * scale_D)


@own_kernel(TRITON, reads=("x_X", "more_D"), writes=("x_X",))
def add_to_planes(x_X: Tensor, more_D: Tensor) -> None:
    """x_i += more, for all planes but the first."""
    x_PD = x_X.double().view(-1, len(more_D))
    x_PD[1:] += more_D
    x_X.copy_(x_PD.flatten())

"""Measures how much the model's predictions depend on each neuron's activated gate.

Silencing a value v costs about v² E[g²] / 2 nats, where g is the gradient of -log p(y) with respect
to v, and y is a token drawn from the model's own prediction. E[g²] is a diagonal entry of the
Fisher information (Kunstner et al. 2019, arXiv 1905.12558, explain why y is drawn and not taken
from the text). So the root mean square of g weighs values of all layers on one scale. One backward
pass per window measures all neurons; it needs no weight gradients.

Letters: L layers, T tokens, D model width, V vocabulary, F neurons."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.sparsify.distillation import chunks, log_words
from hotsplit.sparsify.feed_forward import keeping_values
from hotsplit.sparsify.quality import autocast, hidden_states
from hotsplit.sparsify.student import Student


def sensitivities(student: Student, windows: Sequence[Tensor], ranks: Ranks, seed: int) -> Tensor:
    """f64 [L, F]: the root mean square of g = d(-log p(y)) / d act(gate) over the tokens of the
    windows, which are divided among the processes. The model is used with its current limits.

    Raises HotsplitError if the model's hidden states are not finite."""
    generator = torch.Generator(student.device)
    layers = student.layers
    most_neurons = max(len(layer.limit_F) for layer in layers)
    square_LF = torch.zeros(len(layers), most_neurons, dtype=torch.float64)
    num_tokens = torch.zeros((), dtype=torch.float64)
    with keeping_values(layers):
        for number in range(ranks.rank, len(windows), ranks.size):
            ids_T = windows[number]
            generator.manual_seed(seed + number)  # the same draws for any number of processes
            with autocast(student.device.type, student.dtype):
                hidden_TD = hidden_states(student.model, ids_T[None].to(student.device))[0]
            if not hidden_TD.isfinite().all():
                raise HotsplitError(
                    "the model's hidden states are NaN or infinite on the first windows of the"
                    " corpus; the model's weights are damaged, or so large that products overflow"
                )
            error_TD = drawn_error(hidden_TD.detach(), student.head_VD, generator)
            values = [layer.value for layer in layers]
            found = torch.autograd.grad(hidden_TD, values, grad_outputs=error_TD)
            for square_F, gradient in zip(square_LF, found, strict=True):
                square_F += gradient.flatten(0, -2).float().square().sum(dim=0).double().cpu()
            num_tokens += len(ids_T)
    return (ranks.sum(square_LF) / ranks.sum(num_tokens)).sqrt()


@torch.no_grad()
def drawn_error(hidden_TD: Tensor, head_VD: Tensor, generator: torch.Generator) -> Tensor:
    """[T, D]: the gradient of -log p(y) with respect to the final hidden states, y drawn from p."""
    error_TD = torch.empty_like(hidden_TD)
    for start, stop in chunks(len(hidden_TD), len(head_VD)):
        words_TV = log_words(hidden_TD[start:stop], head_VD).exp_()
        drawn_T1 = torch.multinomial(words_TV, 1, generator=generator)
        words_TV.scatter_add_(1, drawn_T1, torch.full_like(drawn_T1, -1, dtype=words_TV.dtype))
        error_TD[start:stop] = (words_TV.to(head_VD.dtype) @ head_VD).to(error_TD.dtype)
    return error_TD

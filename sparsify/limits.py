"""Sets the neurons' limits such that a given share of the neurons is silent.

What neuron j contributes for a token is about |act(gate_j x)| w_j, with a weight w_j that is
measured on the dense model (under the rule "fatrelu" it is 1). The neuron is silent if that product
is at most t, so limit_j = t / w_j. t tracks the wanted share: after every batch it moves towards
the quantile of |act(gate)| w in that batch (`Limits.move`), until it is frozen.

    sensitivity  w_j is how much the predictions depend on act(gate_j) (`sensitivities`); one t for
                 all layers, so that those that matter less lose more neurons
    uniform      w_j = E|up_j x| |down_j|; every layer has its own t, and all have the same share
    global       w_j of uniform, divided by E|FFN output| of the layer; one t for all layers

Letters: L layers, T tokens, D model width, V vocabulary, F neurons."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotsplit.errors import HotsplitError
from hotsplit.profile.corpus.processes import Ranks
from hotsplit.sparsify.config import Allocation
from hotsplit.sparsify.distillation import chunks, log_words
from hotsplit.sparsify.student import FeedForward, Student, keeping_values

SAMPLES = 1 << 17  # values per layer and pass for a quantile, about
SPEED = 0.2  # share of the way to a batch's quantile that t moves
LAG_STEPS = 10  # with fewer than LAG_STEPS / SPEED steps per share, the speed is LAG_STEPS / steps


class Measure:
    """A watcher that sums, in float64, the values whose means give the neurons' weights."""

    def __init__(self, layers: Sequence[FeedForward]) -> None:
        size = (len(layers), max(len(layer.limit_F) for layer in layers))
        self.layers = layers
        self.up_LF = torch.zeros(size, dtype=torch.float64)
        self.output_L = torch.zeros(len(layers), dtype=torch.float64)
        self.num_tokens_L = [0] * len(layers)

    def __call__(self, layer: int, value_TF: Tensor, up_TF: Tensor, x_TD: Tensor) -> None:
        up_TF, value_TF = up_TF.flatten(0, -2), value_TF.flatten(0, -2)
        down_DF = self.layers[layer].dense[2]
        output_TD = (value_TF * up_TF).to(down_DF.dtype) @ down_DF.T
        self.up_LF[layer] += up_TF.float().abs().sum(dim=0).double().cpu()
        self.output_L[layer] += output_TD.float().norm(dim=1).sum().double().cpu()
        self.num_tokens_L[layer] += len(up_TF)

    def weights(self, allocation: Allocation, ranks: Ranks) -> Tensor:
        """f32 [L, F]: w of every neuron, never 0."""
        tokens_L = ranks.sum(torch.tensor(self.num_tokens_L, dtype=torch.float64))
        up_LF = ranks.sum(self.up_LF) / tokens_L[:, None]
        down_LF = torch.stack([layer.dense[2].double().norm(dim=0).cpu() for layer in self.layers])
        weight_LF = up_LF * down_LF
        if allocation == "global":
            weight_LF = weight_LF / (ranks.sum(self.output_L) / tokens_L)[:, None]
        return scaled(weight_LF, allocation)


def scaled(weight_LF: Tensor, allocation: Allocation) -> Tensor:
    """f32: weights of mean 1, by layer if each has its own t; never 0."""
    mean_L1 = weight_LF.mean(dim=1, keepdim=True) if allocation == "uniform" else weight_LF.mean()
    return (weight_LF / mean_L1).clamp(min=1e-6).float()


@dataclass(kw_only=True)
class Limits:
    """t of every layer and w of every neuron; `set` sets the layers' limits."""

    weight_LF: Tensor
    threshold_L: Tensor  # f64
    allocation: Allocation

    @classmethod
    def of(cls, weight_LF: Tensor, allocation: Allocation) -> "Limits":
        threshold_L = torch.zeros(len(weight_LF), dtype=torch.float64)
        return cls(weight_LF=weight_LF, threshold_L=threshold_L, allocation=allocation)

    @classmethod
    def from_limits(cls, limit_LF: Tensor, allocation: Allocation) -> "Limits":
        """The t and w that give `limit_LF`. Raises ValueError unless all are above 0."""
        if not (limit_LF > 0).all():
            raise ValueError("a neuron's weight cannot be derived from a limit of 0")
        inverse_LF = 1 / limit_LF.double()
        threshold_L = 1 / inverse_LF.mean(dim=1)
        if allocation != "uniform":
            threshold_L = torch.full_like(threshold_L, 1 / float(inverse_LF.mean()))
        return cls(
            weight_LF=(threshold_L[:, None] * inverse_LF).float(),
            threshold_L=threshold_L,
            allocation=allocation,
        )

    @property
    def limit_LF(self) -> Tensor:
        return (self.threshold_L[:, None] / self.weight_LF.double()).float()

    def set(self, layers: Sequence[FeedForward]) -> None:
        for layer, limit_F in zip(layers, self.limit_LF, strict=True):
            layer.limit_F = limit_F.to(layer.dense[0].device)

    def move(self, quantile_L: Tensor, speed: float) -> None:
        """Moves t towards the quantiles of a batch; a `speed` of 1 moves it all the way."""
        self.threshold_L += speed * (quantile_L - self.threshold_L)


class Scores:
    """A watcher that keeps a sample of |act(gate)| w of every layer for one batch."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, value_TF: Tensor, up_TF: Tensor, x_TD: Tensor) -> None:
        value_TF = value_TF.flatten(0, -2)
        step = max(1, value_TF.numel() // SAMPLES)
        weight_F = self.limits.weight_LF[layer].to(value_TF.device)
        scores = value_TF[::step].float().abs() * weight_F
        self.values.setdefault(layer, []).append(scores.flatten())

    def quantiles(self, share: float, ranks: Ranks) -> Tensor:
        """f64 [L]: the quantile of each layer's scores, or of all; the mean over the processes."""
        of_layer = [torch.cat(self.values[layer]) for layer in sorted(self.values)]
        if self.limits.allocation != "uniform":
            found = [_quantile(torch.cat(of_layer), share)] * len(of_layer)
        else:
            found = [_quantile(scores, share) for scores in of_layer]
        self.values.clear()
        return ranks.sum(torch.tensor(found, dtype=torch.float64)) / ranks.size


def _quantile(scores: Tensor, share: float) -> float:
    rank = max(1, round(share * len(scores)))
    return float(scores.kthvalue(rank).values)


def sensitivities(student: Student, windows: Sequence[Tensor], ranks: Ranks, seed: int) -> Tensor:
    """f64 [L, F]: how much the model's predictions depend on each neuron's activated gate: the root
    mean square of g = d(-log p(y)) / d act(gate) over the tokens of the windows, which are divided
    among the processes. The model is used with its current limits.

    Silencing a value v costs about v² E[g²] / 2 nats, where y is a token drawn from the model's own
    prediction. E[g²] is a diagonal entry of the Fisher information (Kunstner et al. 2019, arXiv
    1905.12558, explain why y is drawn and not taken from the text), so that g weighs values of all
    layers on one scale. One backward pass per window measures all neurons; it needs no weight
    gradients.

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
            hidden_TD = student.hidden_states(ids_T[None])[0]
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

"""What drafts by a model's own block are predicted to gain, where the CPU computes everything.

A round drafts n tokens with the block, checks them in a step of n + 1 rows and keeps the accepted
ones. With the chances a(i) of the i-th guess, if those before it are right, it yields

    E(n) = 1 + a(1) + a(1) a(2) + ... + a(1) ... a(n)   tokens in
    C(n) = step(n + 1) + block(E(n)) + (n - 1) block(1)   seconds:

the block's pass over the accepted tokens gives the first guess. The best n is taken; 0 is none.

A step of r rows reads each matrix once, and of experts those that any of its rows chooses: with an
expert's share p of the tokens, 1 - (1 - p)^r of it, if tokens chose independently; those of a text
have more in common. Each further row adds its products, at the rate of a prompt's, and STATE_ROW of
what a recurrent state takes for one; its keys and values are in a cache by then.

Letters: L layers, E experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np

from hotsplit.artifacts.machine_file import Machine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.costs import part_bytes
from hotsplit.options.generation_options import FIRST_IDS
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.units import ExpertUnits

# Assumed, of the guesses at each place if those before are right.
ACCEPTED = (0.8, 0.6, 0.4)
# Of a matrix's time for one row, in which memory is the limit, that of a further one on a machine
# whose figures do not say it.
MATRIX_ROW = 0.1
STATE_ROW = 0.3  # docs/log/texts.md, what a check keeps of recurrent layers


@dataclass(frozen=True, kw_only=True)
class DraftGain:
    """Seconds of a token with the best number of drafted tokens by these shares, and with 1, 2, ...
    of them."""

    num_drafted: int
    token_s: float
    by_number_s: tuple[float, ...]
    accepted: tuple[float, ...]


def draft_gain(
    inputs: Inputs, token_s: float, accepted: Sequence[float] = ACCEPTED
) -> DraftGain | None:
    """`token_s`: seconds of a token without drafts, all of it on the CPU. None for a model without
    a block."""
    model, block, machine = inputs.model, inputs.model.draft, inputs.machine
    if block is None:
        return None
    share_LE = shares(inputs)
    number = block.spec.layers[0].neurons.num_experts
    # The block's experts are assumed to be chosen as those of the last layer are.
    own_LE = share_LE[-1:] if number > 1 else np.ones((1, 1))
    single_s = rows_seconds(model, machine, share_LE, 1)
    costs, reached = machine.costs, list(accumulate(accepted, mul))
    fixed_s = costs.layer_s["exact"].median + costs.token_s.median
    fixed_s += model.spec.vocab_size * costs.logit_s.median

    ids = model.spec.vocab_size
    head_share = FIRST_IDS / ids if ids >= 2 * FIRST_IDS else 1.0

    def block_s(rows: float) -> float:
        return fixed_s + rows_seconds(block, machine, own_LE, rows, head_share)

    found_s = [token_s]
    for num in range(1, len(accepted) + 1):
        tokens = 1 + sum(reached[:num])
        step_s = token_s + rows_seconds(model, machine, share_LE, num + 1) - single_s
        found_s.append((step_s + block_s(tokens) + (num - 1) * block_s(1)) / tokens)
    best = int(np.argmin(found_s))
    return DraftGain(
        num_drafted=best,
        token_s=found_s[best],
        by_number_s=tuple(found_s[1:]),
        accepted=tuple(accepted),
    )


def shares(inputs: Inputs) -> np.ndarray:
    """The share of the tokens that choose each expert, f64 [L, E]; 1 in layers without."""
    units = inputs.units
    if not isinstance(units, ExpertUnits):
        return np.ones((inputs.model.spec.num_layers, 1))
    return units.count_LF / units.rank_LTK.shape[1]


def rows_seconds(
    model: ModelFile, machine: Machine, share_LE: np.ndarray, rows: float, head_share: float = 1.0
) -> float:
    """Seconds of the matrices and states that a step of these rows reads, with this share of the
    head; without what a step takes whatever it reads."""
    total, kv_rate = 0.0, machine.costs.kv_gb_per_s.median * 1e9
    for layer, share_E in enumerate(share_LE):
        for name, entry in model.layer_tensors[layer].items():
            read, used = 1.0, rows
            if part_bytes.is_expert(name):
                number = model.spec.layers[layer].neurons.num_experts
                read = float((1 - (1 - share_E) ** rows).sum()) / number
                used = float(share_E.sum()) * rows / (number * read)
            total += read * _matrix_seconds(machine, entry.kind, entry.num_bytes, used)
        state_s = 2 * part_bytes.state_bytes(model, layer) / kv_rate
        total += state_s * (1 + STATE_ROW * (rows - 1))
    for name, entry in model.tensors.items():
        if name.startswith("nextn.") or name == model.head_name:
            share = head_share if name == model.head_name else 1.0
            total += share * _matrix_seconds(machine, entry.kind, entry.num_bytes, rows)
    return total


def _matrix_seconds(machine: Machine, kind: str, num_bytes: int, rows: float) -> float:
    """Seconds of a product with these rows."""
    of_pass = machine.pass_seconds(kind)
    read_s = 1 / machine.cpu_rate(kind)
    row_s = MATRIX_ROW * read_s if of_pass is None else of_pass[1]
    return num_bytes * (read_s + row_s * (rows - 1))

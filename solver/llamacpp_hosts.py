"""The options of llama.cpp for a plan on several GPUs, of this host or of others that run its
rpc-server.

    --rpc HOST:PORT,...   the other hosts, with one GPU each: the plan's last ones
    --device ...          the GPUs in the plan's order; by default those of other hosts come first
    -ts n,m,...           the layers of each GPU; the head counts as one, the last
    -ot pattern=CPU       the experts of layers that do not fit beside the rest of their GPU's

A layer is on the plan's GPU for it with everything but its experts, which are there whole or in the
main memory of the host that runs llama.cpp: those of the last layers of each GPU, as many as fit.
Names are those of llama.cpp's ggml-rpc.cpp and arg.cpp. What the network takes is in no prediction.

Letters: L layers, I = L + 1 items (the head is the last)."""

import re
from collections.abc import Sequence

import numpy as np

from hotsplit.costs.part_bytes import head_bytes
from hotsplit.errors import HotsplitError
from hotsplit.solver.inputs import Inputs
from hotsplit.solver.layer_split import homes_of, kept_bytes, split_seconds
from hotsplit.solver.llamacpp import ALL, Told
from hotsplit.solver.llamacpp_speed import Division, step_seconds

ENDPOINT = re.compile(r"[\w.-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")


def endpoints(text: str) -> tuple[str, ...]:
    """The hosts of --rpc. Raises HotsplitError."""
    found = tuple(text.split(","))
    wrong = [each for each in found if not ENDPOINT.fullmatch(each)]
    if wrong:
        raise HotsplitError(
            f"--rpc: {wrong[0][:60]!r} is no HOST:PORT; wanted those of llama.cpp's rpc-servers,"
            " with commas between them"
        )
    return found


def device_words(num_gpus: int, rpc: Sequence[str]) -> tuple[str, ...]:
    """The options that name the GPUs. Raises HotsplitError for more hosts than GPUs."""
    if not rpc:
        return ()
    if len(rpc) > num_gpus:
        raise HotsplitError(
            f"--rpc: {len(rpc)} hosts, but the plan is for {num_gpus} GPUs: make one with"
            " --vram-budget once for each GPU, those of other hosts last"
        )
    here = [f"CUDA{number}" for number in range(num_gpus - len(rpc))]
    there = [f"RPC{number}" for number in range(len(rpc))]
    return ("--rpc", ",".join(rpc), "--device", ",".join([*here, *there]))


def several(inputs: Inputs, home_I: np.ndarray, rpc: Sequence[str] = ()) -> list[Told]:
    """What llama.cpp can be told for a plan on several GPUs, best first. `home_I`: the GPU of each
    layer and of the head."""
    named = device_words(len(inputs.budgets), rpc)
    found = [_whole_layers(inputs, named)]
    if (way := _without_some_experts(inputs, home_I, named)) is not None:
        found.append(way)
    return sorted(found, key=lambda way: way.seconds)


def _whole_layers(inputs: Inputs, named: tuple[str, ...]) -> Told:
    """The head and as many of the last layers as fit, the GPUs filled in order."""
    model, num_layers = inputs.model, inputs.model.spec.num_layers
    sizes = [kept_bytes(inputs, layer) for layer in range(num_layers)]
    for first in range(num_layers + 1):
        homes = homes_of(inputs, [*sizes[first:], head_bytes(model)])
        if homes is not None:
            break
    else:
        seconds = split_seconds(inputs, num_layers, [], False)
        return Told(arguments=(*named, "-ngl", "0"), words="all on the CPU", seconds=seconds)
    counts = np.bincount(homes, minlength=len(inputs.budgets))
    counts[homes[-1]] += _ahead(inputs)
    return Told(
        arguments=(*named, "-ngl", str(counts.sum()), "-ts", _joined(counts)),
        words=f"the head and {num_layers - first} of {num_layers} layers on the GPUs",
        seconds=split_seconds(inputs, first, homes, True),
    )


def _ahead(inputs: Inputs) -> int:
    """Layers that predict tokens further ahead, which llama.cpp counts before the head."""
    return inputs.model.num_skipped + (inputs.model.spec.draft is not None)


def _without_some_experts(
    inputs: Inputs, home_I: np.ndarray, named: tuple[str, ...]
) -> Told | None:
    """None for a model without experts, and if the rest of its layers does not fit."""
    model, layers = inputs.model, inputs.model.spec.layers
    if not model.spec.has_experts:
        return None
    cold = list[int]()
    for gpu, budget in enumerate(inputs.budgets):
        own = np.flatnonzero(home_I[:-1] == gpu)
        if not len(own) and home_I[-1] != gpu:
            continue
        room = budget - inputs.workspace - head_bytes(model) * bool(home_I[-1] == gpu)
        room -= sum(kept_bytes(inputs, int(n), has_experts=False) for n in own)
        if room < 0:
            return None
        for layer in own[::-1].tolist():
            experts = kept_bytes(inputs, layer) - kept_bytes(inputs, layer, has_experts=False)
            if experts <= room:
                room -= experts
            elif layers[layer].route is not None:
                cold.append(layer)
    counts = np.bincount(home_I, minlength=len(inputs.budgets))
    counts[home_I[-1]] += _ahead(inputs)
    there = "|".join(map(str, sorted(cold)))
    pattern = rf"blk\.({there})\.ffn_(gate|up|down|gate_up)_exps\.=CPU"
    division = Division(homes=tuple(home_I[:-1].tolist()), cold=cold, head=int(home_I[-1]))
    return Told(
        arguments=(
            *named,
            "-ngl",
            ALL,
            "-ts",
            _joined(counts),
            *(("-ot", pattern) if cold else ()),
        ),
        words=f"all but the experts of {len(cold)} layers on the GPUs",
        seconds=step_seconds(inputs, division),
    )


def _joined(counts: np.ndarray) -> str:
    return ",".join(map(str, counts.tolist()))

"""The check that ends every load with a GPU: the logits of a short prompt and of a step, computed
as the plan says, are compared with the CPU's.

Whatever the GPU computes before its first text runs in a thread of its own with a time limit,
because a call that waits for a device cannot be ended. A GPU that fails is not used: the model is
loaded again for the CPU (runtime.loading).

Letters: V vocabulary."""

import logging
import math
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.model.modes import Mode
from hotsplit.options.cache_types import CacheTypes
from hotsplit.runtime.device.cuda_runtime import DeviceLost
from hotsplit.runtime.device.device_memory import is_out_of_memory
from hotsplit.runtime.model.loader import load_weights
from hotsplit.runtime.model.placement import Placement
from hotsplit.runtime.ops.expert_choices import Place, Swapped
from hotsplit.runtime.ops.neurons.feed_forward import Traffic
from hotsplit.runtime.ops.observers import Observers
from hotsplit.runtime.ops.structs import NotNative
from hotsplit.runtime.prefill.cold_stream import LEAST_TOKENS
from hotsplit.runtime.step import native_step
from hotsplit.runtime.step.decoder import Decoder
from hotsplit.runtime.step.sequences import Sequences

# The largest |got - want| / |want| of logits. A GPU rounds the factors of prompts to 16 bits, and
# a prediction or an activation close to its threshold may differ; unrelated logits differ by 1.4.
BOUND = 0.1
# Of scores of a router, relative to the largest: 16-bit factors move them by about 1 %.
TIE, MOST_TIES = 0.02, 16
# For building a step, with the compilation of its kernels, and for the logits. On an H100, all of
# the first load of a 7 B plan took 10 s.
LIMIT_S = 120.0
NUM_TOKENS = LEAST_TOKENS + 1  # a prompt that streams cold weights if the plan does, and a step
_MOST_LETTERS = 160  # of an error's message
_SOURCE_PLACE = re.compile(r"at \d+:\d+:$")  # how Triton's errors begin

T = TypeVar("T")
log = logging.getLogger(__name__)


class DeviceFails(Exception):
    """A GPU cannot be used. The message says why, in one line."""


def check_logits(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Raises DeviceFails unless the logits of each pass are within BOUND of those wanted."""
    for name, logits_V in got.items():
        (error,) = _errors({name: logits_V}, want)
        if not error <= BOUND:
            raise DeviceFails(
                f"the logits of {name} are off by {error:.2g} from the CPU's, at most {BOUND:g}"
                " wanted"
            )


def check_against_cpu(
    got: Mapping[str, Tensor], model: ModelFile, mode: Mode, types: CacheTypes
) -> None:
    """`check_logits` with the CPU's. If a mixture's are off, the CPU takes the other expert at near
    ties of the last two tokens, in the order in which they are computed, where that brings it
    closer to the GPU."""
    want, swaps = logits_on_cpu(model, mode, types), set[Place]()
    if model.spec.has_experts and not max(_errors(got, want)) <= BOUND:
        want, near = _routed_on_cpu(model, mode, types, swaps)
        tried = set[Place]()
        while not max(_errors(got, want)) <= BOUND and len(tried) < MOST_TIES:
            left = sorted({*near} - tried, key=lambda place: place[::-1])
            if not left:
                break
            tried.add(left[0])
            other, then = _routed_on_cpu(model, mode, types, swaps | {left[0]})
            if sum(_errors(got, other)) < sum(_errors(got, want)):
                want, near, swaps = other, then, swaps | {left[0]}
    check_logits(got, want)
    if swaps:
        log.info(
            f"{model.path}: {len(swaps)} choices of experts are ties within the GPU's rounding; the"
            " CPU's logits are those with its choice"
        )


def _errors(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> list[float]:
    """|got - want| / |want| of each pass; infinite with NaN."""
    errors = []
    for name, logits_V in got.items():
        right_V = want[name.removesuffix(AGAIN)].double()
        error = float((logits_V.double() - right_V).norm() / right_V.norm())
        errors.append(math.inf if math.isnan(error) else error)
    return errors


def _routed_on_cpu(
    model: ModelFile, mode: Mode, types: CacheTypes, swaps: Collection[Place]
) -> tuple[dict[str, Tensor], list[Place]]:
    """`logits_on_cpu` with routers in torch and the other expert at some places, and the near ties
    of the last two tokens."""
    first = min(NUM_TOKENS, model.spec.context_length) - 2
    with Swapped(model.spec, swaps, TIE, first=max(0, first)) as swapped:
        return logits_on_cpu(model, mode, types, routes_in_torch=True), swapped.near


AGAIN = " again"


def logits_of(decoder: Decoder, vocab_size: int, *, repeats: bool) -> dict[str, Tensor]:
    """Logits f32 [V] after a prompt and after a step behind it. `repeats`: the prompt is computed a
    second time first, which may replay a graph that the first one has captured."""
    sequences = Sequences(decoder)
    count = min(NUM_TOKENS, sequences.context_length)
    ids = [(7919 * (number + 1)) % vocab_size for number in range(count)]
    prompt, last = ids[: max(1, count - 1)], ids[max(1, count - 1) :]
    found: dict[str, Tensor] = {}
    for suffix in ("", AGAIN) if repeats else ("",):
        with sequences.open() as text:
            found[f"a prompt{suffix}"] = text.extend(prompt)[0].clone()
            if last:
                found["a step"] = text.extend(last)[0].clone()
    return found


def logits_on_cpu(
    model: ModelFile, mode: Mode, types: CacheTypes, *, routes_in_torch: bool = False
) -> dict[str, Tensor]:
    """`logits_of` the CPU, whose weights stay in the mapped file. `routes_in_torch`: see
    Engine.observe."""
    placement = Placement.on_one_device(model.spec.num_layers, torch.device("cpu"))
    context_length = min(NUM_TOKENS, model.spec.context_length)
    weights = load_weights(
        model, placement, mode, context_length, notice=lambda line: None, cache_types=types
    )
    observers, step = Observers(), native_step.build(weights, Traffic())
    if routes_in_torch:
        observers.add(lambda *_: None, lambda *_: False, routes_in_torch=True)
    decoder = Decoder(weights=weights, observers=observers, native=step)
    return logits_of(decoder, model.spec.vocab_size, repeats=False)


def within_time(run: Callable[[], T], limit_s: float) -> T:
    """The result of a function, which runs in a thread of its own; raises what it raises. At the
    limit the thread is abandoned, as it is by an interrupt, and DeviceFails is raised."""
    results: list[T] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            results.append(run())
        except Exception as error:  # noqa: BLE001  # passed on to the caller
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise DeviceFails(f"a prompt and a step take longer than {limit_s:g} s")
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def failures_of_device(device: torch.device) -> Iterator[None]:
    """Turns the errors of a GPU's libraries into DeviceFails. Memory that is short is not a
    failure."""
    try:
        yield
    except DeviceFails as failed:
        raise DeviceFails(f"{device}: {failed}") from None
    except (DeviceLost, NotNative, ImportError) as error:
        raise DeviceFails(f"{device}: {_line_of(error)}") from error
    except HotsplitError:
        raise
    except Exception as error:  # noqa: BLE001  # Triton's have no common class
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        raise DeviceFails(f"{device}: {type(error).__name__}: {_line_of(error)}") from error


def _line_of(error: Exception) -> str:
    """An error's first line; the last one if the first is a place in source code."""
    lines = [line for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = " ".join(lines[-1 if _SOURCE_PLACE.match(lines[0]) else 0].split())
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_MOST_LETTERS]

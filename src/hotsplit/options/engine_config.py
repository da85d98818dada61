"""The options of an engine: one list of their names, types, defaults and rules.

`Engine.load` and `Engine.of` take the fields as keywords. All other code passes an EngineConfig.
The command line reads its defaults from here, without importing torch. What depends on the model,
the plan or the machine is checked at load (runtime.resolved_options)."""

import re
from dataclasses import dataclass
from typing import Annotated, TypedDict

from annotated_types import Interval

from hotsplit.errors import HotsplitError
from hotsplit.files.typed import shown
from hotsplit.model.mode_quality import MAX_LOSS
from hotsplit.model.modes import Mode
from hotsplit.model.rope import check_scaling
from hotsplit.options.cache_types import CacheTypes
from hotsplit.options.key_selection import KeySelection
from hotsplit.options.kinds import check_fields
from hotsplit.options.neuron_cache_options import CacheOptions, Off

MAX_SEQUENCES = 1024
MOST_THREADS = 1024
_DEVICE = re.compile(r"(cpu|cuda)(:(0|[1-9][0-9]?))?")


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig as keywords, for type checkers; a test holds the two equal."""

    mode: Mode | None
    device: str | None
    context_length: int | None
    is_resident: bool | None
    ram_bytes: int | None
    graph: bool
    cpu_ffn: bool
    num_sequences: int
    max_loss: float
    cache_type_k: str | None
    cache_type_v: str | None
    kv_offload: str | None
    rope_scaling: str | None
    rope_scale: float | None
    neuron_cache: CacheOptions | Off | None
    draft_block: bool


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine is loaded. Raises HotsplitError for values that no model allows.

    mode: "dense", "exact" or "predicted"; None takes the plan's. Without a plan it takes the mode
    that reads the fewest bytes among those that cannot change the output or cost at most `max_loss`
    of the perplexity by the file's record (costs.default_mode has the details).

    device: "cpu" or "cuda[:n]", for everything that the plan does not put on the CPU; None takes
    CUDA if there is a device. A load with a GPU ends with a check of its logits
    (runtime.device_check); if it fails, the CPU is used, with a warning.

    context_length: tokens per text that the KV cache holds; None takes the plan's, or the model's
    up to 4,096; 0 takes the plan's, or all of the model's.

    is_resident: true copies the CPU's weights into memory, in the layout for decoding; false leaves
    them in the mapped file, which loads at once but decodes more slowly; None copies them if the
    CPU needs at most nine tenths of the free memory.

    ram_bytes: main memory that the process takes at most: weights, keys and values, temporaries and
    what Python needs; None: what is free. Experts of a mixture that do not fit are read from the
    model's file when a token has chosen them.

    graph: whether a step on CUDA is captured as a CUDA graph; without one, results are the same and
    decoding is slower, but can be debugged.

    cpu_ffn: instead of a plan, puts all feed-forward neurons on the CPU and everything else on the
    device, except an embedding that is not also the head and, with kv_offload, keys and values.

    num_sequences: number of texts held at a time, each of up to context_length tokens; with a plan,
    at most as many as it budgets.

    max_loss: the relative rise of the perplexity that the choice of a mode accepts.

    cache_type_k, cache_type_v: storage types of keys and values (hotsplit.options.cache_types),
    where the CPU holds them: on device cpu without a plan, or with cpu_ffn and kv_offload; None
    takes f32 for a model in f32 and f16 for others, and for values the type of the keys.

    kv_offload: "on", or sizes such as "window=2048,top=512": a token of a long text reads only the
    first keys, a window of the last ones, and between them those with the largest estimated weights
    (hotsplit.options.key_selection). Without a plan it works on device cpu or with cpu_ffn. With a
    plan, only the plan's own selection is allowed; None takes it.

    rope_scaling, rope_scale: replace the model's own scaling of rotary embeddings: "none", "linear"
    or "yarn" (hotsplit.model.rope), and the ratio of the longest text to the training length. If
    only the scale is given, the scaling is YaRN; if only the scaling is given, the scale is what
    context_length needs.

    neuron_cache: an online cache that swaps the neurons in GPU memory to follow the text, starting
    with the plan's hot neurons; the plan must have room for it. None uses it if the plan has room
    and runs in its own mode; "off" never does.

    draft_block: whether the draft block of a file that has one is loaded, on the CPU or where a
    plan has it; beside a GPU only where drafts can be checked there."""

    mode: Mode | None = None
    device: str | None = None
    context_length: int | None = None
    is_resident: bool | None = None
    ram_bytes: Annotated[int, Interval(ge=1)] | None = None
    graph: bool = True
    cpu_ffn: bool = False
    num_sequences: Annotated[int, Interval(ge=1, le=MAX_SEQUENCES)] = 1
    max_loss: float = MAX_LOSS
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    kv_offload: str | None = None
    rope_scaling: str | None = None
    rope_scale: float | None = None
    neuron_cache: CacheOptions | Off | None = None
    draft_block: bool = False

    @property
    def rope(self) -> tuple[str | None, float | None]:
        """Kind and scale of the rotary embeddings asked for."""
        return self.rope_scaling, self.rope_scale

    def __post_init__(self) -> None:
        check_fields(self)
        if self.context_length is not None and self.context_length < 0:
            raise HotsplitError(
                f"context_length (-c) is {self.context_length}, wanted 1 or more, or 0 for the"
                " model's"
            )
        if not self.max_loss >= 0:  # rejects NaN; infinity accepts all
            raise HotsplitError(f"max_loss is {self.max_loss}, wanted 0 or more, e.g. 0.01")
        check_device(self.device)
        for name in (self.cache_type_k, self.cache_type_v):
            if name is not None:
                CacheTypes.of(name)
        if self.kv_offload is not None:
            KeySelection.parse(self.kv_offload)
        check_scaling(self.rope_scaling, self.rope_scale)


def check_device(device: str | None) -> None:
    """Raises HotsplitError unless it names a device of an engine; None is CUDA or the CPU."""
    if device is not None and not _DEVICE.fullmatch(device):
        raise HotsplitError(f"device {shown(device)}; wanted cpu or cuda")


def check_threads(count: int | None) -> None:
    """Raises HotsplitError for an impossible number of threads; None is the default."""
    if count is not None and not 1 <= count <= MOST_THREADS:
        raise HotsplitError(f"--threads is {shown(count)}, wanted 1 to {MOST_THREADS}")

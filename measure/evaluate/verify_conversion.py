"""Verifies that a written model file is the model it was made from, by logits on a short text.

The reference is the source's own graph (transformers' in f32, or for a GGUF that of our runtime)
with the file's values put back into it, so that both sides have the rounding of the file's types,
whose effect grows from layer to layer. The other side is the runtime's graph with the file's values
unpacked to f32, hence with an f32 KV cache. The logits can then differ by the order of f32 sums and
by errors: wrong names, a wrong order of rows, a wrong graph. Where a router's choice of experts is
a tie within such differences, the reference takes the runtime's (see runtime.ops.expert_choices).
Reading the values back (see hotsplit.files.written) also checks that they equal the source's up to
rounding. What the rounding cost is another question, and has an answer of its own: the divergence
from the source as it is.

Letters: T tokens, V vocabulary."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.errors import HotsplitError
from hotsplit.families.expert_keys import expert_place
from hotsplit.families.key_reader import KeyReader
from hotsplit.files.gguf_file import TensorEntry, array_entry, unpacked
from hotsplit.files.typed import shown
from hotsplit.files.written import Restored, Written
from hotsplit.measure.evaluate.comparison import PIECE, Compared, Comparison
from hotsplit.model.weight_types import BY_NAME, FLOAT_NAMES
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.kernels.stored import unpack
from hotsplit.runtime.ops.expert_choices import Followed
from hotsplit.runtime.text.codec import TextCodec
from hotsplit.runtime.weights.matrix import matrix_of
from hotsplit.system.sizes import format_bytes
from hotsplit.system.system_memory import free_memory_bytes

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1876, def fib(n): return n if n < 2 else"
    " fib(n - 1) + fib(n - 2)  # naïve, but right; 0x1F + 3.14 = ?\n"
    "The river rises in the mountains and flows north for three hundred kilometres before it"
    " reaches the sea. In spring, when the snow melts, it floods the meadows along its lower"
    " course, and the farmers move their cattle to higher ground. A bridge was built here in the"
    " nineteenth century, because the ferry could not run in winter. It was made of iron, which"
    " rusted, so that it had to be replaced after sixty years. The new one is made of concrete and"
    " carries a railway line as well"
    ' as the road.\n"How long have you lived here?" she asked. "All my life," he said. "My father'
    " was the last ferryman. When I was a boy, he let me take the rudder on Sundays, and I thought"
    ' that nothing would ever change." He laughed and poured her another cup of tea.\n'
    "Water boils at 100 degrees Celsius at sea level. At higher altitudes the pressure of the air"
    " is lower, and so is the boiling point: on a mountain of 3,000 metres it is about 90 degrees."
    " That is why potatoes take longer to cook there.\n"
)
MAX_TOKENS = 256
# Mean divergence from the source, in nats, above which a file is warned of. Llama 3 8B has 0.07 in
# Q4_0, 0.10 in q3_K_M and 0.23 in q3_K_S, its worst type of 3 bits, and 0.33 to 0.45 in q2_K
# (tools/perplexity/README.md of llama.cpp): there the text of small models falls apart.
LARGE_DIVERGENCE = 0.25
# Relative error of the logits. Correct small files had up to 9e-7 in every type, one of 24 layers
# 6e-6; a wrong epsilon, a missing linear rope factor of 1.1 and the wrong form of GELU gave 3e-4 to
# 8e-3, but the wrong form of GELU only 6e-6 with small weights (docs/log/files.md).
BOUND = 1e-4


@dataclass(frozen=True, kw_only=True)
class Verification:
    """`relative_error` is |got - want| / |want| over all logits; it is None if there was no
    reference, and `line` says why. `rounding`: the written file against the source as it is; None
    if nothing was rounded to fewer bits than 16, or there was no reference."""

    relative_error: float | None
    line: str
    rounding: Compared | None = None
    warning: str | None = None

    @property
    def lines(self) -> list[str]:
        return [self.line, *([self.warning] if self.warning else [])]


@dataclass(frozen=True, kw_only=True)
class References:
    """Logits f32 [T, V] of the source with the written values and, if asked for, its own."""

    rounded_TV: Tensor
    source_TV: Tensor | None


class Skipped(Exception):
    """There is no reference; the message is the reason."""


@torch.inference_mode()
def verify(written: Written) -> Verification:
    """Compares a written file with its source; the logits only if there is a reference. Raises
    HotsplitError if they differ."""
    model = ModelFile.load(written.path)
    ids = text_token_ids(model)
    is_folder = written.source.is_dir()
    name = "transformers'" if is_folder else "the source's"
    check, logits_of = (
        (_check_transformers, _transformers_logits)
        if is_folder
        else (_check_source, _source_logits)
    )
    try:
        if model.graph.is_assistant:
            raise Skipped("an assistant has none without its main model")
        check(written)
        got_TV, followed = _followed_logits(_in_f32(model), ids)
        wanted = logits_of(written, ids, followed, has_source=_is_rounded(written, model))
    except Skipped as reason:
        for _ in written.restored():  # the values can be checked in any case
            pass
        return Verification(relative_error=None, line=f"values verified, logits not: {reason}")
    error = _relative_error(got_TV, wanted.rounded_TV)
    fault = None if followed is None else followed.fault
    if fault is not None or not error <= BOUND:
        raise HotsplitError(
            f"{written.output.name}: its logits differ from {name} by"
            f" {error:.1e} on {len(ids)} tokens"
            + (f", more than {BOUND:.0e}" if fault is None else f": {fault}")
            + (
                " (its ties of experts are not known)"
                if followed and not followed.is_complete
                else ""
            )
            + "; the file is not kept: please report the source; --no-verify keeps it"
        )
    line = f"verified: logits equal {name} to {error:.1e} on {len(ids)} tokens"
    if followed is not None and followed.num_ties:
        line += (
            ", given the same experts where the choice is a tie within rounding"
            f" ({followed.num_ties:,} of {followed.num_choices:,})"
        )
    kinds = [entry.in_file.kind for entry in model.tensors.values()]
    kind = max(set(kinds) - {"f32"}, key=kinds.count, default=None)
    if kind is not None:
        line += f", both with the weights as rounded to {kind}"
    if wanted.source_TV is None or kind is None or len(ids) < 2:
        return Verification(relative_error=error, line=line)
    comparison = Comparison(1)
    comparison.begin_window()
    comparison.add(wanted.source_TV[:-1], [got_TV[:-1]], torch.tensor(ids[1:]))
    rounding = comparison.result(0)
    line += (
        f"; the rounding itself: KL {rounding.divergence.mean:.3g} from the source, same top token"
        f" {rounding.agreement.mean:.0%}"
    )
    warning = None
    if kind != "q8_0" and rounding.divergence.mean > LARGE_DIVERGENCE:
        num_values = sum(math.prod(e.shape) for e in model.tensors.values() if len(e.shape) > 1)
        size = format_bytes(round(BY_NAME["q8_0"].bytes_per_value * num_values))
        warning = (
            f"in {kind} this model has lost much (KL {rounding.divergence.mean:.2g} from the"
            f" source, over {LARGE_DIVERGENCE:g}: more than types of 3 bits cost an 8B) and may"
            f" babble; --outtype q8_0 loses little, and takes {size}"
        )
    return Verification(relative_error=error, line=line, rounding=rounding, warning=warning)


def _is_rounded(written: Written, model: ModelFile) -> bool:
    """True if the file has matrices in fewer than 16 bits, in other types than the source."""
    kinds = Counter(entry.in_file.kind for entry in model.tensors.values())
    if kinds.keys() <= set(FLOAT_NAMES):
        return False
    _, tensors = ({}, {}) if written.source.is_dir() else read_model_gguf(written.source)
    return kinds != Counter(entry.kind for entry in tensors.values())


def _in_f32(model: ModelFile) -> ModelFile:
    cpu = torch.device("cpu")

    def by_runtime(entry: TensorEntry) -> TensorEntry:
        def read_rows(start: int, stop: int) -> np.ndarray:
            matrix = matrix_of(entry, cpu)
            return unpack(matrix.data[start:stop], matrix.kind).numpy()

        is_matrix = len(entry.shape) > 1 and entry.kind != "f32"
        return replace(entry, kind="f32", read_rows=read_rows) if is_matrix else entry

    return replace(model, tensors={name: by_runtime(e) for name, e in model.tensors.items()})


def text_token_ids(model: ModelFile) -> list[int]:
    """Token ids of TEXT by the file's tokenizer, or arbitrary ids if it has none."""
    limit, vocab_size = min(MAX_TOKENS, model.spec.context_length), model.spec.vocab_size
    try:
        ids = [token for token in TextCodec.of(model).encode(TEXT) if token < vocab_size]
    except HotsplitError:  # the file has no known tokenizer
        ids = []
    return (ids or [(7919 * place + 11) % vocab_size for place in range(MAX_TOKENS)])[:limit]


def _relative_error(got_TV: Tensor, want_TV: Tensor) -> float:
    if got_TV.shape != want_TV.shape:
        return math.inf
    squares_2 = torch.zeros(2, dtype=torch.float64)  # in pieces: vocabularies are large
    for got_PV, want_PV in zip(got_TV.split(PIECE), want_TV.split(PIECE), strict=True):
        exact_PV = want_PV.double()
        each = (got_PV.double() - exact_PV).square_().sum(), exact_PV.square_().sum()
        squares_2 += torch.stack(each)
    error = (squares_2[0] / squares_2[1].clamp(min=1e-60)).sqrt()
    return error.item() if bool(torch.isfinite(error)) else math.inf


@contextmanager
def _transformers_may_fail() -> Iterator[None]:
    """Raises Skipped without transformers, and for all that it may raise for an odd config;
    silences its table of missing and unexpected tensors, and its progress bars, which stay off."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        from transformers.utils import logging
    except ImportError as error:
        raise Skipped("transformers is not installed: pip install 'hotsplit[convert]'") from error
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        StrictDataclassError,
        TypeError,
        ValueError,
    ) as error:
        line = " ".join(str(error).split())[:200] or type(error).__name__
        raise Skipped(f"transformers cannot run the checkpoint ({line})") from error
    finally:
        logging.set_verbosity(verbosity)


def _check_transformers(written: Written) -> None:
    """Raises Skipped if transformers does not know the checkpoint, or needs more memory than there
    is, and HotsplitError if it would run an architecture other than the one in `architectures`,
    which `convert` went by. Weights in f32 and intermediates take three times the size of a 16-bit
    checkpoint (measured)."""
    folder = written.source
    with _transformers_may_fail():
        from transformers.activations import ACT2FN
        from transformers.configuration_utils import PretrainedConfig
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )

        values, _ = PretrainedConfig.get_config_dict(folder, local_files_only=True)
        kind, activation = values.get("model_type"), values.get("hidden_act")
        architectures = values.get("architectures")
        named = architectures[0] if isinstance(architectures, list) and architectures else None
        classes = {
            **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        }
        taken = classes.get(kind) if isinstance(kind, str) else None
        if taken is None:
            raise Skipped(f"transformers does not know model_type {str(kind)[:60]!r}")
        if taken != named and named in classes.values():
            raise HotsplitError(
                f"{folder / 'config.json'}: model_type is {shown(kind)}, which is {taken}, but"
                f" architectures has {shown(named)}; correct the one that is wrong"
            )
        if activation is not None and activation not in ACT2FN:
            raise Skipped(f"transformers does not know the activation {shown(activation)}")
        files = [*folder.glob("*.safetensors")] or [*folder.glob("pytorch_model*.bin")]
        needed, free = 3 * sum(file.stat().st_size for file in files), free_memory_bytes()
        if needed > 0.8 * free:
            raise Skipped(
                f"transformers needs about {needed / 1e9:.0f} GB for it; {free / 1e9:.0f} GB are"
                " free"
            )


def _transformers_logits(
    written: Written, ids: list[int], followed: Followed | None, *, has_source: bool
) -> References:
    with _transformers_may_fail():
        model = _load(written.source)

        def logits() -> Tensor:
            return model(torch.tensor([ids]), use_cache=False).logits[0].float()

        source_TV = logits() if has_source else None
        _put_back(model.state_dict(), written.restored())
        with followed or nullcontext():
            return References(rounded_TV=logits(), source_TV=source_TV)


def _load(folder: Path) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    packing = getattr(config, "quantization_config", None)
    if isinstance(packing, dict):  # so that the weights can be put back
        config.quantization_config = packing | {"dequantize": True}
    if hasattr(config, "time_step_min"):  # Nemotron-H clamps the steps of prompts alone
        config.time_step_min = 1e-30
    is_text = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return (
        (AutoModelForCausalLM if is_text else AutoModelForImageTextToText)
        .from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            experts_implementation="eager",  # others want widths that are multiples of 4
        )
        .eval()
        .float()  # beside FP8 transformers leaves other weights in their own type
    )


# Parts of published names, and of transformers'; in this order.
_RENAMED = (
    (".block_sparse_moe.", ".mlp."),
    (".router.layer.", ".router."),
    (".router.gate.", ".gate."),
    (".shared_mlp.", ".shared_experts."),
    (".moe_statics.", "."),
    (".forget_gate.", "."),
    (".expert_bias", ".e_score_correction_bias"),
    (".gate.e_score_correction_bias", ".e_score_correction_bias"),
)


# Of Kimi Linear; transformers has the three convolutions as one.
_PIECE = re.compile(r"\.shard_\d+\.weight$")
_PART_OF_CONVOLUTION = re.compile(r"(.*\.)([qkv])_conv1d\.weight")


def _renamed(name: str) -> str:
    """A name as transformers 5 has it (conversion_mapping.py), for all models alike."""
    # Of a text model beside one for images:
    name = name.removeprefix("language_model.").replace(".language_model.", ".")
    name = f"model.{name.removeprefix('backbone.')}" if name.startswith("backbone.") else name
    for published, own in _RENAMED:
        name = name.replace(published, own)
    return _PIECE.sub(".weight", name)


def _put_back_expert(state: dict[str, Tensor], name: str, item: Restored) -> None:
    """Into the state's tensor of this name, which holds the item's experts."""
    place = expert_place(name)
    assert place is not None, name
    own, values = state[name][item.expert], torch.from_numpy(item.values)
    part, parts = place.names.index(item.tensor), len(place.names)
    if f"{name}_bias" in state:  # with columns of gates and ups in turn (gpt-oss)
        own[:, part::parts] = values.T
    elif name.endswith("_bias"):
        own[part::parts] = values
    else:
        own[part * len(values) : (part + 1) * len(values)] = values


def _put_back(state: dict[str, Tensor], restored: Iterable[Restored]) -> None:
    of_experts: dict[str, str] = {}
    for name in state:
        place = expert_place(name)
        for tensor in () if place is None else place.names:
            of_experts.setdefault(tensor, name)
    renamed = {name: _renamed(name) for name in state}
    for item in restored:
        if item.expert is not None:
            if item.tensor not in of_experts:
                raise Skipped(f"transformers has another name for the experts in {item.source!r}")
            _put_back_expert(state, of_experts[item.tensor], item)
            continue
        source, part = _renamed(item.source), None
        if joined := _PART_OF_CONVOLUTION.fullmatch(source):
            source, part = joined[1] + "conv1d.weight", "qkv".index(joined[2])
        names = [n for n, own in renamed.items() if own == source or own.endswith(f".{source}")]
        if len(names) != 1:
            raise Skipped(f"transformers has another name for the tensor {item.source!r}")
        target = state[names[0]]
        target = target if part is None else target.chunk(3)[part]
        values = torch.from_numpy(item.values).reshape(-1, *target.shape[1:])
        if item.rows is None:
            target.copy_(values)
        else:
            target[torch.from_numpy(item.rows)] = values


def _check_source(written: Written) -> None:
    _, tensors = read_model_gguf(written.source)
    needed = sum(4 * math.prod(entry.shape) for entry in tensors.values())
    if needed > 0.8 * free_memory_bytes():
        raise Skipped(f"the source needs about {needed / 1e9:.0f} GB in f32")


def _source_logits(
    written: Written, ids: list[int], followed: Followed | None, *, has_source: bool
) -> References:
    """Logits with the source's header and layout, and the file's values and thresholds."""
    keys, tensors = read_model_gguf(written.source)
    own = ModelFile.load(written.path)
    keys = keys | {"hotsplit.ffn.activation": own.activation}
    keys["hotsplit.ffn.threshold"] = list(own.threshold_L)
    _, tensors = KeyReader(written.source, keys, tensors).model()
    source_TV = None
    if has_source:
        in_f32 = {name: unpacked(entry) for name, entry in tensors.items()}
        source_TV = _logits(ModelFile.of(written.source, keys, in_f32), ids)
    values: dict[str, list[np.ndarray]] = {}
    for item in written.restored():
        values.setdefault(item.source, []).append(item.values)
    entries = {
        name: array_entry(np.stack(each) if len(tensors[name].shape) == 3 else each[0], "f32")
        for name, each in values.items()
    }
    entries |= {n: e for n, e in tensors.items() if "ffn_pred_" in n}
    rounded_TV = _logits(ModelFile.of(written.source, keys, entries), ids, followed)
    return References(rounded_TV=rounded_TV, source_TV=source_TV)


def _logits(model: ModelFile, ids: list[int], followed: Followed | None = None) -> Tensor:
    with _engine(model, ids) as engine:
        if followed is None:
            return engine.logits(ids)
        with engine.observe(lambda *_: None, lambda *_: False, routes_in_torch=True), followed:
            return engine.logits(ids)


def _followed_logits(model: ModelFile, ids: list[int]) -> tuple[Tensor, Followed | None]:
    """Dense logits [T, V], and a mixture's choices of experts, which a reference follows."""
    if not model.spec.has_experts:
        return _logits(model, ids), None
    found: dict[int, list[Tensor]] = {}

    def observe(name: str, layer: int | None, id_TK: Tensor) -> None:
        assert layer is not None, name
        found.setdefault(layer, []).append(id_TK.clone())

    with (
        _engine(model, ids) as engine,
        engine.observe(observe, lambda name, layer: name == "ffn_experts"),
    ):
        got_TV = engine.logits(ids)
    return got_TV, Followed(model.spec, [torch.cat(found[layer]) for layer in sorted(found)], BOUND)


def _engine(model: ModelFile, ids: list[int]) -> Engine:
    return Engine.of(model, mode="dense", device="cpu", context_length=len(ids), is_resident=False)

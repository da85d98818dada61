"""model.gguf: the weights, the tokenizer and what the runtime must know to compute with them.

Specified in docs/formats.md. Two layouts: `sparse`, where every feed-forward matrix is
neuron-major (a row is a neuron, the down projection is `ffn_down_t`), and `stock`, which is
exactly what llama.cpp loads. What this module does not know: how to compute anything.

Letters: L layers, D model width, F feed-forward neurons of a layer, R predictor rank."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np

from sparkinfer.errors import SparkinferError
from sparkinfer.gguf_file import TensorEntry, Value, read_gguf, write_gguf

VERSION = 1
ARCHITECTURES = ("llama",)
Layout = Literal["sparse", "stock"]
Activation = Literal["relu", "fatrelu", "drelu", "silu"]
PredictorKind = Literal["linear", "relu"]
KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0")
TOKENIZER_KEY = "tokenizer.huggingface.json"
TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes and constants of a decoder; rotary angles turn adjacent pairs (llama.cpp's way)."""

    num_layers: int
    width: int  # D
    num_neurons: int  # F
    num_heads: int
    num_kv_heads: int
    head_width: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope_theta: float
    rope_linear_factor: float = 1.0  # positions are divided by it


@dataclass(frozen=True, kw_only=True)
class PredictorInfo:
    """How the predictors of all layers are to be read.

    logits_F = up_FR act(down_RD x_D + down_bias) + up_bias, with act the identity ("linear") or
    ReLU ("relu", DejaVu's form); a neuron is computed where its logit is above the threshold of
    its layer. x is the FFN input of the layer `input_layer_offset` before it."""

    kind: PredictorKind
    rank_L: tuple[int, ...]
    threshold_L: tuple[float, ...]
    input_layer_offset: int = 0
    density_L: tuple[float, ...] = ()  # share of neurons named on held-out text; () is unknown


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    path: Path
    layout: Layout
    model_id: str
    shape: ModelShape
    activation: Activation
    threshold_L: tuple[float, ...]  # a neuron fires above it: gate > t, or |silu(gate)| > t
    predictor: PredictorInfo | None
    tensors: dict[str, TensorEntry]
    extra_keys: dict[str, Value]  # tokenizer, name, and the like: carried through unread

    @classmethod
    def load(cls, path: Path) -> "ModelFile":
        """Reads the header; weights stay in the mapped file.

        Raises SparkinferError for anything but a whole, known model file."""
        return cls.from_gguf(path, *read_gguf(path, "model file (GGUF)"))

    @classmethod
    def from_gguf(
        cls, path: Path, keys: Mapping[str, Value], tensors: dict[str, TensorEntry]
    ) -> "ModelFile":
        """What `load` gives, of a file that was read already (a large vocabulary takes seconds)."""
        read = _KeyReader(path, keys)
        read.architecture()
        shape = read.shape()
        model = cls(
            path=path,
            layout="sparse" if "blk.0.ffn_down_t.weight" in tensors else "stock",
            model_id=read.model_id(tensors),
            shape=shape,
            activation=read.activation(),
            threshold_L=read.floats("sparkinfer.ffn.threshold", shape.num_layers, 0.0),
            predictor=read.predictor(shape.num_layers),
            tensors=tensors,
            extra_keys={k: v for k, v in keys.items() if _is_extra(k)},
        )
        model.validate()
        return model

    def save(self, path: Path, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Writes the file whole or not at all; `on_bytes` hears of every tensor written."""
        self.validate()
        write_gguf(path, "llama", {**self._own_keys(), **self.extra_keys}, self.tensors,
                   on_bytes=on_bytes)  # fmt: skip

    def validate(self) -> None:
        """Raises SparkinferError unless exactly the expected tensors are there, well-shaped."""
        wanted = expected_shapes(self.shape, self.layout, self.predictor)
        tied = "output.weight" not in self.tensors
        if tied:
            wanted.pop("output.weight")
        optional = {"rope_freqs.weight"} | {n for n in self.tensors if n in _biases(self)}
        unknown = sorted(self.tensors.keys() - wanted.keys() - optional)
        missing = sorted(wanted.keys() - self.tensors.keys())
        if unknown or missing:
            what = f"unknown tensor {unknown[0]!r}" if unknown else f"no tensor {missing[0]!r}"
            raise SparkinferError(
                f"{self.path}: {what} for a {self.layout} llama of {self.shape.num_layers} layers;"
                " convert the checkpoint again"
            )
        if "rope_freqs.weight" in self.tensors:
            wanted["rope_freqs.weight"] = (self.shape.head_width // 2,)
        for name, shape in wanted.items():
            entry = self.tensors[name]
            if entry.shape != shape or entry.kind not in KINDS:
                raise SparkinferError(
                    f"{self.path}: {name} is {entry.kind} {list(entry.shape)},"
                    f" wanted {list(shape)} of one of {', '.join(KINDS)}"
                )

    @property
    def is_tied(self) -> bool:
        """Whether the output head is the embedding matrix."""
        return "output.weight" not in self.tensors

    @property
    def head_name(self) -> str:
        return "token_embd.weight" if self.is_tied else "output.weight"

    def text(self, key: str) -> str | None:
        """A string among the extra keys, or None."""
        value = self.extra_keys.get(key)
        return value if isinstance(value, str) else None

    def _own_keys(self) -> dict[str, Value]:
        s = self.shape
        keys: dict[str, Value] = {
            "llama.block_count": np.uint32(s.num_layers),
            "llama.context_length": np.uint32(s.context_length),
            "llama.embedding_length": np.uint32(s.width),
            "llama.feed_forward_length": np.uint32(s.num_neurons),
            "llama.attention.head_count": np.uint32(s.num_heads),
            "llama.attention.head_count_kv": np.uint32(s.num_kv_heads),
            "llama.attention.key_length": np.uint32(s.head_width),
            "llama.attention.value_length": np.uint32(s.head_width),
            "llama.attention.layer_norm_rms_epsilon": np.float32(s.norm_epsilon),
            "llama.rope.dimension_count": np.uint32(s.head_width),
            "llama.rope.freq_base": np.float32(s.rope_theta),
            "llama.vocab_size": np.uint32(s.vocab_size),
            "sparkinfer.model_id": self.model_id,
        }
        if s.rope_linear_factor != 1.0:
            keys["llama.rope.scaling.type"] = "linear"
            keys["llama.rope.scaling.factor"] = np.float32(s.rope_linear_factor)
        if self.layout == "sparse":
            keys["sparkinfer.version"] = np.uint32(VERSION)
            keys["sparkinfer.ffn.activation"] = self.activation
            keys["sparkinfer.ffn.threshold"] = list(self.threshold_L)
        if self.predictor is not None:
            p = self.predictor
            keys["sparkinfer.predictor.kind"] = p.kind
            keys["sparkinfer.predictor.rank"] = list(p.rank_L)
            keys["sparkinfer.predictor.threshold"] = list(p.threshold_L)
            keys["sparkinfer.predictor.input_layer_offset"] = np.uint32(p.input_layer_offset)
            if p.density_L:
                keys["sparkinfer.predictor.density"] = list(p.density_L)
        return keys


def expected_shapes(
    shape: ModelShape, layout: Layout, predictor: PredictorInfo | None
) -> dict[str, tuple[int, ...]]:
    """Every tensor a model file must have (with an untied head), and its shape."""
    d, f = shape.width, shape.num_neurons
    q, kv = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (shape.vocab_size, d),
        "output_norm.weight": (d,),
        "output.weight": (shape.vocab_size, d),
    }
    for layer in range(shape.num_layers):
        down = {"ffn_down_t.weight": (f, d)} if layout == "sparse" else {"ffn_down.weight": (d, f)}
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (d,),
            "attn_q.weight": (q, d),
            "attn_k.weight": (kv, d),
            "attn_v.weight": (kv, d),
            "attn_output.weight": (d, q),
            "ffn_norm.weight": (d,),
            "ffn_gate.weight": (f, d),
            "ffn_up.weight": (f, d),
            **down,
        }
        if predictor is not None:
            rank = predictor.rank_L[layer]
            block |= {"ffn_pred_down.weight": (rank, d), "ffn_pred_up.weight": (f, rank)}
        shapes |= {f"blk.{layer}.{name}": dims for name, dims in block.items()}
    return shapes


def _biases(model: ModelFile) -> set[str]:
    """Names of the predictor biases that have the right shape."""
    if model.predictor is None:
        return set()
    names = set()
    for layer, rank in enumerate(model.predictor.rank_L):
        for part, size in (("down", rank), ("up", model.shape.num_neurons)):
            name = f"blk.{layer}.ffn_pred_{part}.bias"
            if name in model.tensors and model.tensors[name].shape == (size,):
                names.add(name)
    return names


def compute_model_id(
    config: Mapping[str, object], samples: Iterable[tuple[str, tuple[int, ...], bytes]]
) -> str:
    """Names weights: sha256 over the config and each tensor's name, shape and sampled bytes.

    The same for every type and layout made of one checkpoint, and cheap for 100 GB."""
    volatile = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
    stable = {key: value for key, value in config.items() if key not in volatile}
    digest = hashlib.sha256(json.dumps(stable, sort_keys=True, default=str).encode())
    for name, shape, sample in sorted(samples, key=lambda item: item[0]):
        digest.update(f"{name}{list(shape)}".encode())
        digest.update(sample)
    return digest.hexdigest()


def sample_bytes(raw: np.ndarray) -> bytes:
    """4 KiB from the start, the middle and the end of a tensor's bytes."""
    flat = raw.reshape(-1).view(np.uint8)
    middle = len(flat) // 2
    return b"".join(flat[a : a + 4096].tobytes() for a in (0, middle, max(0, len(flat) - 4096)))


def _is_extra(key: str) -> bool:
    own = ("GGUF.", "llama.", "sparkinfer.", "general.architecture", "general.alignment")
    return not key.startswith(own)


class _KeyReader:
    """Typed reads of the header, each with its own refusal."""

    def __init__(self, path: Path, keys: Mapping[str, Value]) -> None:
        self.path, self.keys = path, keys

    def architecture(self) -> str:
        found = str(self.keys.get("general.architecture", "none"))
        if found not in ARCHITECTURES:
            raise SparkinferError(
                f"{self.path}: architecture {found!r}; known: {', '.join(ARCHITECTURES)}"
            )
        version = self.keys.get("sparkinfer.version", np.uint32(VERSION))
        if version != VERSION:
            raise SparkinferError(
                f"{self.path}: format version {version}, this program reads {VERSION};"
                " convert the checkpoint again"
            )
        return found

    def number(self, key: str, default: float | None = None) -> float:
        value = self.keys.get(key, default)
        if not isinstance(value, int | float | np.number) or isinstance(value, bool):
            raise SparkinferError(f"{self.path}: key {key!r} is {value!r}, wanted a number")
        return float(value)

    def floats(self, key: str, count: int, default: float | None = None) -> tuple[float, ...]:
        values = self.keys.get(key, None if default is None else [default] * count)
        if (
            not isinstance(values, list)
            or len(values) != count
            or not all(isinstance(value, int | float) for value in values)
        ):
            found = f"{len(values)} values" if isinstance(values, list) else repr(values)
            raise SparkinferError(f"{self.path}: key {key!r} has {found}, wanted {count} numbers")
        numbers = tuple(float(value) for value in values)
        if np.isnan(numbers).any():
            raise SparkinferError(f"{self.path}: key {key!r} has a NaN")
        return numbers

    def choice(self, key: str, kind: object, default: str) -> str:
        value = self.keys.get(key, default)
        if value not in get_args(kind):
            raise SparkinferError(f"{self.path}: key {key!r} is {value!r}, wanted {get_args(kind)}")
        return cast(str, value)

    def activation(self) -> Activation:
        return cast(Activation, self.choice("sparkinfer.ffn.activation", Activation, "silu"))

    def shape(self) -> ModelShape:
        def count(key: str, default: float | None = None) -> int:
            value = self.number(f"llama.{key}", default)
            if value < 1 or value != int(value):
                raise SparkinferError(f"{self.path}: llama.{key} is {value}, wanted a count")
            return int(value)

        heads, width = count("attention.head_count"), count("embedding_length")
        head_width = count("attention.key_length", width // heads)
        scaling = self.keys.get("llama.rope.scaling.type", "none")
        if (
            scaling not in ("none", "linear")
            or count("rope.dimension_count", head_width) != head_width
            or count("attention.value_length", head_width) != head_width
        ):
            raise SparkinferError(
                f"{self.path}: this kind of rotary embedding is not supported"
                f" (scaling {scaling!r}, wanted none or linear, over whole heads)"
            )
        tokens = self.keys.get("tokenizer.ggml.tokens", [])
        return ModelShape(
            num_layers=count("block_count"),
            width=width,
            num_neurons=count("feed_forward_length"),
            num_heads=heads,
            num_kv_heads=count("attention.head_count_kv", heads),
            head_width=head_width,
            vocab_size=count("vocab_size", len(tokens) if isinstance(tokens, list) else 0),
            context_length=count("context_length"),
            norm_epsilon=self.number("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=self.number("llama.rope.freq_base", 10000.0),
            rope_linear_factor=(
                self.number("llama.rope.scaling.factor") if scaling == "linear" else 1.0
            ),
        )

    def predictor(self, num_layers: int) -> PredictorInfo | None:
        if "sparkinfer.predictor.kind" not in self.keys:
            return None
        prefix = "sparkinfer.predictor."
        has_density = prefix + "density" in self.keys
        return PredictorInfo(
            kind=cast(PredictorKind, self.choice(prefix + "kind", PredictorKind, "")),
            rank_L=tuple(int(rank) for rank in self.floats(prefix + "rank", num_layers)),
            threshold_L=self.floats(prefix + "threshold", num_layers),
            input_layer_offset=int(self.number(prefix + "input_layer_offset", 0)),
            density_L=self.floats(prefix + "density", num_layers) if has_density else (),
        )

    def model_id(self, tensors: Mapping[str, TensorEntry]) -> str:
        """The key that `convert` wrote; for a file that others made, computed from the file."""
        value = self.keys.get("sparkinfer.model_id")
        if isinstance(value, str):
            return value
        samples = ((n, e.shape, sample_bytes(e.read())) for n, e in tensors.items())
        config = {k: v for k, v in self.keys.items() if k.startswith("llama.")}
        return compute_model_id(config, samples)

"""Headers of published GGUFs, made from the models' descriptions: the keys, and the names, shapes
and types of tensors as llama.cpp's converter and quantize write them. There are no weights: a file
has the size of the real one, but is sparse. Matrices have a row for each word of the vocabulary,
whose words are left out."""

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import cast

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from tokenizers import pre_tokenizers

Tensor = tuple[str, tuple[int, ...], str]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
ALIGNMENT = 32
INPUTS = 256  # values of a layer's own input in Gemma 4's E-models
# What llama.cpp's quantize makes of a matrix: its main type, that of the output, and that of every
# second down projection and of the values (the real rule has more cases).
MIXTURES = {
    "q4_k_m": ("q4_k", "q6_k", "q6_k"),
    "q5_k_m": ("q5_k", "q6_k", "q6_k"),
    "q3_k_m": ("q3_k", "q6_k", "q5_k"),
    "q6_k": ("q6_k",) * 3,
    "q8_0": ("q8_0",) * 3,
    "f16": ("f16",) * 3,
    "bf16": ("bf16",) * 3,
    "q4_0": ("q4_0", "q6_k", "q4_0"),
    "iq4_xs": ("iq4_xs", "q6_k", "q5_k"),
    "iq2_xxs": ("iq2_xxs", "q5_k", "q2_k"),
    "iq3_xxs": ("iq3_xxs", "q5_k", "iq4_xs"),
    "tq1_0": ("tq1_0", "q6_k", "tq1_0"),
    "mxfp4": ("q8_0", "q8_0", "q8_0"),
}
EXPERTS = {"mxfp4": "mxfp4"}  # the type of all matrices of experts, where it is another
# Types of matrices by part, with their numbers, where a file mixes more. Those of the 27 B's
# UD-Q2_K_XL are counted in its header (anthony-chaudhary/fak, issue 9820; its draft block has six
# more matrices in them); which part has which is a guess.
CENSUSES = {
    "ud-q2_k_xl": {
        "token_embd": "q4_k 1",
        "output": "q5_k 1",
        "ffn_gate": "iq1_s 20 iq2_xs 34 iq2_s 9 iq1_m 1",
        "ffn_up": "iq2_xxs 48 q2_k 16",
        "ffn_down": "iq3_s 57 iq2_s 7",
        "attn_gate": "iq3_xxs 48",
        "attn_qkv": "iq2_s 48",
        "ssm_out": "iq3_xxs 48",
        "ssm_alpha": "q8_0 48",
        "ssm_beta": "q8_0 48",
        "attn_q": "iq3_xxs 16",
        "attn_k": "q4_k 16",
        "attn_v": "iq4_xs 5 q6_k 6 q3_k 5",
        "attn_output": "iq4_xs 13 q4_k 3",
    }
}
STRIDE = 29  # by which types are dealt out to layers, so that a few layers have most of them


@dataclass(frozen=True, kw_only=True)
class Header:
    """`sizes`: layers, width, neurons, heads, key heads, size of a head, words. `experts`: number,
    used, neurons of each, shared neurons, layers without. `marks`: what the layers have
    (`_attention`, `_feed_forward`). `pre`: the pre-tokenizer; "llama" is SentencePiece's tokenizer.
    `words`: what `plan` has to say, or why it refuses."""

    name: str
    architecture: str
    sizes: tuple[int, ...]
    words: str
    is_refused: bool = False
    pre: str = "llama"
    kind: str = "q4_k_m"
    marks: str = ""
    experts: tuple[int, ...] = (0,) * 5
    keys: Mapping[str, object] = field(default_factory=dict)


def keys_of(header: Header) -> dict[str, object]:
    """The keys of the file; None in `header.keys` leaves one out."""
    num_layers, width, neurons, heads, key_heads, head_dim, _ = header.sizes
    number, used, each, _, lead = header.experts
    own: dict[str, object] = {
        "block_count": num_layers,
        "context_length": 32768,
        "embedding_length": width,
        "feed_forward_length": neurons,
        "attention.head_count": heads,
        "attention.head_count_kv": key_heads,
        "rope.freq_base": 1e6,
        "rope.dimension_count": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    if head_dim * heads != width or "long" in header.marks:
        own |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if "every_fourth_full" in header.marks:  # from the end, or, with layers without experts, 0
        full = 0 if lead else 3
        own["attention.sliding_window_pattern"] = [n % 4 != full for n in range(num_layers)]
    if "gemma4" in header.marks:
        is_wide_L = [_is_wide(header, layer) for layer in range(num_layers)]
        own |= {
            "attention.sliding_window_pattern": [not is_wide for is_wide in is_wide_L],
            "attention.shared_kv_layers": 18 * num_layers // 42 if "inputs" in header.marks else 0,
            "embedding_length_per_layer_input": INPUTS if "inputs" in header.marks else 0,
        }
        if "keys_as_values" in header.marks:
            own |= {"attention.head_count_kv": [1 if wide else key_heads for wide in is_wide_L]}
    if number:
        own |= {"expert_count": number, "expert_used_count": used}
        own |= {"expert_feed_forward_length": each} if each != neurons else {}
        own |= {"leading_dense_block_count": lead} if lead else {}
    own = {f"{header.architecture}.{key}": value for key, value in own.items()}
    given = {
        key
        if key.startswith(("general.", "tokenizer.", "split.", "quantize.", "adapter.", "clip."))
        else f"{header.architecture}.{key}": value[:num_layers]
        if isinstance(value, list) and not key.startswith("tokenizer.")
        else value
        for key, value in header.keys.items()
    }
    first = {
        "general.architecture": header.architecture,
        "general.type": "model",
        "general.name": header.name,
        "general.file_type": 15,
    }
    found = first | own | _tokenizer(header.pre) | given
    return {key: value for key, value in found.items() if value is not None}


def _tokenizer(pre: str) -> dict[str, object]:
    if pre == "llama":
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": BYTES,
            "tokenizer.ggml.scores": [0.0] * len(BYTES),
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*LETTERS, "ab"],
        "tokenizer.ggml.token_type": [1] * 257,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def tensors_of(header: Header) -> Iterator[Tensor]:
    """Names, shapes (outermost dimension first) and types."""
    if header.kind in CENSUSES:
        yield from _dealt_out(header)
        return
    num_layers, width, _, _, _, _, words = header.sizes
    main, output, better = MIXTURES[header.kind]
    if header.keys.get("general.type") == "adapter":
        yield "blk.0.attn_q.weight.lora_a", (16, width), main
        yield "blk.0.attn_q.weight.lora_b", (width, 16), main
        return
    kind = output if "tied" in header.marks else main
    yield "token_embd.weight", (words, width), _whole(kind, (width,))
    norm = "token_embd_norm" if "conv" in header.marks else "output_norm"
    yield f"{norm}.weight", (width,), "f32"
    if "norm_bias" in header.marks:
        yield "output_norm.bias", (width,), "f32"
    if "tied" not in header.marks:
        yield "output.weight", (words, width), _whole(output, (width,))
    if "head_bias" in header.marks:
        yield "output.bias", (words,), "f32"
    if "factors" in header.marks:
        rotated = 512 if "gemma4" in header.marks else header.sizes[5]
        yield "rope_freqs.weight", (rotated // 2,), "f32"
    if "longrope" in header.marks:
        rotated = header.keys.get("rope.dimension_count", header.sizes[5])
        assert isinstance(rotated, int), rotated
        yield "rope_factors_long.weight", (rotated // 2,), "f32"
        yield "rope_factors_short.weight", (rotated // 2,), "f32"
    if "inputs" in header.marks:
        yield "per_layer_token_embd.weight", (words, num_layers * INPUTS), output
        yield "per_layer_model_proj.weight", (num_layers * INPUTS, width), "bf16"
        yield "per_layer_proj_norm.weight", (INPUTS,), "f32"
    for layer in range(num_layers):
        kind = better if layer % 2 else main
        for name, shape in _layer(header, layer):
            is_better = name.startswith(("attn_v.", "ffn_down", "attn_qkv")) and len(shape) > 1
            is_plain = len(shape) == 1 or name.endswith(".bias") or _is_small(name)
            own = "f32" if is_plain else kind if is_better else main
            if name.endswith("_exps.weight"):
                own = EXPERTS.get(header.kind, own)
            yield f"blk.{layer}.{name}", shape, _whole(own, shape)


def _dealt_out(header: Header) -> Iterator[Tensor]:
    """The tensors, in the types of a census."""
    given: Counter[str] = Counter()
    for name, shape, kind in tensors_of(replace(header, kind="f16")):
        part = name.removesuffix(".weight").split(".")[-1]
        words = CENSUSES[header.kind].get(part, f"{kind} 1").split()
        pairs = zip(words[::2], map(int, words[1::2]), strict=True)
        kinds = [own for own, count in pairs for _ in range(count)]
        yield name, shape, kinds[given[part] * STRIDE % len(kinds)]
        given[part] += 1


def _is_small(name: str) -> bool:
    own = ("ffn_gate_inp", "ssm_conv1d", "ssm_alpha", "ssm_beta", "ssm_norm", "shortconv.conv")
    return name.startswith(own) or name in ("ssm_a", "ssm_d")


def _whole(kind: str, shape: Sequence[int]) -> str:
    """The type, or that which quantize falls back to for rows that are no whole blocks of it."""
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return kind if shape[-1] % block == 0 else "q8_0" if kind == "q6_k" else "q5_0"


def _layer(header: Header, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, marks = header.sizes[1], header.marks.split()
    for norm in _norms(marks):
        yield "ffn_norm" if "both" in marks and norm == "ffn_norm" else f"{norm}.weight", (width,)
        if "norm_bias" in marks:
            yield f"{norm}.bias", (width,)
    heads = header.keys.get("attention.head_count_kv")
    if "single" in marks:  # the norm and one block
        neurons = header.keys["feed_forward_length"]
        assert isinstance(heads, list) and isinstance(neurons, list)
        if neurons[layer]:
            yield from _feed_forward(header, layer)
        else:
            yield from _attention(header, layer) if heads[layer] else _mamba2(header)
        return
    if "mamba" in marks and isinstance(heads, list) and not heads[layer]:
        yield from _mamba2(header)
    elif "kimi" in marks and isinstance(heads, list) and not heads[layer]:
        yield from _kimi(header)
    elif "delta" in marks and layer % 4 < 3:
        yield from _delta(header)
    elif "conv" in marks and isinstance(heads, list) and not heads[layer]:
        yield "shortconv.in_proj.weight", (3 * width, width)
        yield "shortconv.conv.weight", (width, 3)
        yield "shortconv.out_proj.weight", (width, width)
    else:
        yield from _attention(header, layer)
    if "both" in marks:
        yield from _mamba2(header)
    yield from _feed_forward(header, layer)
    if "inputs" in marks:
        yield "inp_gate.weight", (INPUTS, width)
        yield "proj.weight", (width, INPUTS)
        yield "post_norm.weight", (width,)
    if "gemma4" in marks:
        yield "layer_output_scale.weight", (1,)


def _norms(marks: Sequence[str]) -> list[str]:
    if "norms_after" in marks:
        return ["post_attention_norm", "post_ffw_norm"]
    if "norms_around" in marks:
        return ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
    if "parallel" in marks or "single" in marks:
        return ["attn_norm"]
    return ["attn_norm", "post_attention_norm" if "second" in marks else "ffn_norm"]


def _attention(header: Header, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    _, width, _, heads, key_heads, head_dim, _ = header.sizes
    if "latent" in header.marks:
        yield from _latent(header)
        return
    marks, is_wide = header.marks.split(), _is_wide(header, layer)
    if is_wide:
        head_dim, key_heads = 512, 1 if "keys_as_values" in marks else key_heads
    queries, keys = heads * head_dim, key_heads * head_dim
    if "fused" in marks or "fused_qkv" in marks:
        yield "attn_qkv.weight", (queries + 2 * keys, width)
        if "biases" in marks:
            yield "attn_qkv.bias", (queries + 2 * keys,)
    else:
        gated = 2 if "delta" in marks else 1
        yield "attn_q.weight", (gated * queries, width)
        yield "attn_k.weight", (keys, width)
        if "keys_as_values" not in marks or not is_wide:
            yield "attn_v.weight", (keys, width)
        if "bias" in marks or "biases" in marks:
            yield "attn_q.bias", (queries,)
            yield "attn_k.bias", (keys,)
            yield "attn_v.bias", (keys,)
    yield "attn_output.weight", (width, queries)
    if "biases" in marks:
        yield "attn_output.bias", (width,)
    if "own_gates" in marks:
        yield "attn_gate.weight", (queries, width)
    if "head_norms" in marks:
        yield "attn_q_norm.weight", (head_dim,)
        yield "attn_k_norm.weight", (head_dim,)
    if "wide_norms" in marks:
        yield "attn_q_norm.weight", (queries,)
        yield "attn_k_norm.weight", (keys,)
    if "sinks" in marks:
        yield "attn_sinks.weight", (heads,)


def _latent(header: Header) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Latent attention; older files have the second matrices of keys and values as one."""
    width, heads = header.sizes[1], header.sizes[3]

    def number(name: str, default: int = 0) -> int:
        found = header.keys.get(name, default)
        assert isinstance(found, int), found
        return found

    rank, rotated = number("attention.q_lora_rank"), number("rope.dimension_count")
    size = number("attention.kv_lora_rank")
    is_old = "attention.key_length_mla" not in header.keys
    query = number("attention.key_length_mla", header.sizes[5])
    value, plain = number("attention.value_length_mla", width // heads), query - rotated
    if rank:
        yield "attn_q_a.weight", (rank, width)
        yield "attn_q_a_norm.weight", (rank,)
        yield "attn_q_b.weight", (heads * query, rank)
    else:
        yield "attn_q.weight", (heads * query, width)
    yield "attn_kv_a_mqa.weight", (size + rotated, width)
    yield "attn_kv_a_norm.weight", (size,)
    if is_old:
        yield "attn_kv_b.weight", (heads * (plain + value), size)
    else:
        yield "attn_k_b.weight", (heads, size, plain)
        yield "attn_v_b.weight", (heads, value, size)
    yield "attn_output.weight", (width, heads * value)
    if "indexed" in header.marks:
        count, of_head = (number(f"attention.indexer.{n}") for n in ("head_count", "key_length"))
        yield "indexer.attn_q_b.weight", (count * of_head, rank)
        yield "indexer.attn_k.weight", (of_head, width)
        yield "indexer.k_norm.weight", (of_head,)
        yield "indexer.k_norm.bias", (of_head,)
        yield "indexer.proj.weight", (count, width)


def _is_wide(header: Header, layer: int) -> bool:
    """Whether a layer of Gemma 4 has no window: then it has wider heads."""
    return "gemma4" in header.marks and layer % 6 == 5


def _delta(header: Header) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A gated delta net of 16 key heads, and value heads, of 128."""
    heads = header.keys["ssm.time_step_rank"]
    assert isinstance(heads, int)
    width, values, channels = header.sizes[1], heads * 128, 2 * 16 * 128 + heads * 128
    yield "attn_qkv.weight", (channels, width)
    yield "attn_gate.weight", (values, width)
    yield "ssm_conv1d.weight", (channels, 4)
    yield "ssm_dt.bias", (heads,)
    yield "ssm_a", (heads,)
    yield "ssm_alpha.weight", (heads, width)
    yield "ssm_beta.weight", (heads, width)
    yield "ssm_norm.weight", (128,)
    yield "ssm_out.weight", (width, values)


def _mamba2(header: Header) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, inner, groups, state = (
        cast(int, header.keys[f"ssm.{key}"])
        for key in ("time_step_rank", "inner_size", "group_count", "state_size")
    )
    width, channels = header.sizes[1], inner + 2 * groups * state
    yield "ssm_in.weight", (inner + channels + heads, width)
    yield "ssm_conv1d.weight", (channels, 4)
    yield "ssm_conv1d.bias", (channels,)
    yield "ssm_dt.bias", (heads,)
    yield "ssm_a", (heads, 1)
    yield "ssm_d", (heads, 1)
    if "both" not in header.marks:
        yield "ssm_norm.weight", (groups, inner // groups)
    yield "ssm_out.weight", (width, inner)


def _kimi(header: Header) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, heads = header.sizes[1], header.sizes[3]
    of_head = cast(int, header.keys["kda.head_dim"])
    for name in "qkv":
        yield f"attn_{name}.weight", (heads * of_head, width)
        yield f"ssm_conv1d_{name}.weight", (heads * of_head, 1, 4)
    for name in "fg":
        yield f"ssm_{name}_a.weight", (of_head, width)
        yield f"ssm_{name}_b.weight", (heads * of_head, of_head)
    yield "ssm_beta.weight", (heads, width)
    yield "ssm_a", (heads, 1)
    yield "ssm_dt.bias", (heads * of_head,)
    yield "ssm_norm.weight", (of_head,)
    yield "attn_output.weight", (width, heads * of_head)


def _feed_forward(header: Header, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    _, width, neurons, *_ = header.sizes
    number, _, each, shared, lead = header.experts
    marks = header.marks.split()
    if number and layer >= lead:
        yield "ffn_gate_inp.weight", (number, width)
        if "no_gate" not in marks:
            yield "ffn_gate_exps.weight", (number, each, width)
        latent = cast(int, header.keys.get("moe_latent_size", width))
        yield "ffn_up_exps.weight", (number, each, latent)
        yield "ffn_down_exps.weight", (number, latent, each)
        if latent != width:
            yield "ffn_latent_down.weight", (latent, width)
            yield "ffn_latent_up.weight", (width, latent)
        if "choice_bias" in marks:
            yield "exp_probs_b" if header.architecture == "hy_v3" else "exp_probs_b.bias", (number,)
        if "expert_biases" in marks:
            yield "ffn_gate_inp.bias", (number,)
            yield "ffn_gate_exps.bias", (number, each)
            yield "ffn_up_exps.bias", (number, each)
            yield "ffn_down_exps.bias", (number, width)
        if shared:
            if "no_gate" not in marks:
                yield "ffn_gate_shexp.weight", (shared, width)
            yield "ffn_up_shexp.weight", (shared, width)
            yield "ffn_down_shexp.weight", (width, shared)
            if "delta" in marks:
                yield "ffn_gate_inp_shexp.weight", (width,)
        return
    if "fused" in marks:
        yield "ffn_up.weight", (2 * neurons, width)
    else:
        if "no_gate" not in marks:
            yield "ffn_gate.weight", (neurons, width)
        yield "ffn_up.weight", (neurons, width)
    yield "ffn_down.weight", (width, neurons)
    if "biases" in marks and not number:
        yield "ffn_up.bias", (neurons,)
        yield "ffn_down.bias", (width,)


# ---- files --------------------------------------------------------------------------------------


def write(path: Path, keys: Mapping[str, object], tensors: Sequence[Tensor]) -> None:
    """A GGUF of version 3 without its weights, but with factors of rotary embeddings."""
    factors: list[tuple[int, int]] = []
    data, offset = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))), 0
    for name, value in keys.items():
        data += _text(name) + _value(value)
    for name, shape, kind in tensors:
        number = GGMLQuantizationType[kind.upper()]
        block, block_bytes = GGML_QUANT_SIZES[number]
        sizes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
        data += (
            _text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", number, offset)
        )
        if name.startswith("rope_f"):
            factors.append((offset, prod(shape)))
        offset += -(-prod(shape) // block * block_bytes // ALIGNMENT) * ALIGNMENT
    begin = -(-len(data) // ALIGNMENT) * ALIGNMENT
    with path.open("wb") as file:
        file.write(data)
        file.truncate(begin + offset)
        for start, count in factors:
            file.seek(begin + start)
            file.write(struct.pack("<f", 1.0) * count)


def write_parts(folder: Path, header: Header, count: int) -> Path:
    """The model in several files, as llama-gguf-split makes them; returns the first."""
    tensors, paths = list(tensors_of(header)), []
    for number in range(count):
        paths.append(folder / f"{header.name}-{number + 1:05d}-of-{count:05d}.gguf")
        own = keys_of(header) if number == 0 else {}
        place = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        write(paths[-1], own | place, tensors[number::count])
    return paths[0]


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    """A value with its type before it: u32, f32, bool, string, or an array of them."""
    code, packed = _plain(value[0] if isinstance(value, list) else value)
    if not isinstance(value, list):
        return struct.pack("<I", code) + packed
    parts = b"".join(_plain(each)[1] for each in value)
    return struct.pack("<IIQ", 9, code, len(value)) + parts


def _plain(value: object) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (5, struct.pack("<i", value)) if value < 0 else (4, struct.pack("<I", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    assert isinstance(value, str), value
    return 8, _text(value)


# ---- the table ----------------------------------------------------------------------------------

_GEMMA4 = {
    "attention.key_length": 512,
    "attention.value_length": 512,
    "attention.key_length_swa": 256,
    "attention.value_length_swa": 256,
    "rope.dimension_count": 512,
    "rope.dimension_count_swa": 256,
    "rope.freq_base_swa": 1e4,
    "final_logit_softcapping": 30.0,
    "tokenizer.ggml.model": "gemma4",
    "tokenizer.ggml.pre": None,
    "tokenizer.ggml.tokens": [*BYTES, "a", "b", "ab"],
    "tokenizer.ggml.scores": [0.0] * 262,
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
}
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
# Values of each layer, by the name of the file and of the key.
_OF_LAYERS: dict[str, dict[str, object]] = {
    "granite-4.0-h-small-Q4_K_M": {
        "attention.head_count_kv": [8 * (n % 10 == 5) for n in range(40)]
    },
    "Nemotron-3-Nano-30B-A3B-Q4_K_M": {
        "attention.head_count_kv": [2 * (letter == "*") for letter in _NANO],
        "feed_forward_length": [1856 * (letter == "E") for letter in _NANO],
    },
    "Nemotron-3-Super-120B-A12B-Q4_K_M": {
        "attention.head_count_kv": [2 * (letter == "*") for letter in _SUPER],
        "feed_forward_length": [2688 * (letter == "E") for letter in _SUPER],
    },
    "Kimi-Linear-48B-A3B-Instruct-Q4_K_M": {
        "attention.head_count_kv": [int(n in (3, 7, 11, 15, 19, 23, 26)) for n in range(27)]
    },
    "LFM2-1.2B-Q4_K_M": {
        "attention.head_count_kv": [8 * (n in (2, 5, 8, 10, 12, 14)) for n in range(16)]
    },
    "LFM2-8B-A1B-Q4_K_M": {
        "attention.head_count_kv": [8 * (n in (2, 6, 10, 14, 18, 21)) for n in range(24)]
    },
}
# Keys that several files have, by a name; values are JSON, or words.
_SHARED = """
*yarn rope.scaling.type=yarn rope.scaling.factor=32.0 rope.scaling.original_context_length=4096
*delta ssm.conv_kernel=4 ssm.state_size=128 ssm.group_count=16 ssm.inner_size=4096
  ssm.time_step_rank=32 full_attention_interval=4 rope.dimension_count=64
  rope.dimension_sections=[11,11,10,0]
*imatrix quantize.imatrix.file=m.imatrix quantize.imatrix.dataset=calibration.txt
  quantize.imatrix.entries_count=224 quantize.imatrix.chunks_count=125
*qwen3_vl context_length=262144 rope.freq_base=5e6 rope.dimension_sections=[24,20,20,0]
  n_deepstack_layers=3
*no_rope rope.freq_base=null rope.dimension_count=null
*lfm2 context_length=128000 attention.layer_norm_rms_epsilon=1e-05 vocab_size=65536
  shortconv.l_cache=3
*layer_norms attention.layer_norm_epsilon=1e-05 attention.layer_norm_rms_epsilon=null
  rope.freq_base=null
*hunyuan context_length=262144 rope.freq_base=11158840.0 rope.scaling.type=none
  rope.scaling.factor=1.0 rope.scaling.original_context_length=262144
*sigmoid expert_gating_func=2 expert_weights_norm=true
*latent attention.kv_lora_rank=512 attention.key_length=576 attention.value_length=512
  attention.key_length_mla=192 attention.value_length_mla=128 rope.dimension_count=64
  expert_shared_count=1 expert_weights_norm=true expert_gating_func=2
*yarn_of_v3 rope.freq_base=1e4 rope.scaling.type=yarn rope.scaling.factor=40.0
  rope.scaling.original_context_length=4096 rope.scaling.yarn_log_multiplier=0.1
  context_length=163840
"""
# Name, architecture, pre-tokenizer, sizes, and, if any, marks, experts, shared keys (*) and own
# keys, of which a later one wins; lines that begin with spaces continue one.
# Nemotron 3's rope.dimension_count is of what does not rotate, without the width of heads; Hy3's
# leading_dense_block_count is not written by llama.cpp's converter.
_TABLE = """
Llama-3.1-8B-Instruct-Q4_K_M llama llama-bpe 32,4096,14336,32,8,128,128256 marks=factors *imatrix
  context_length=131072 rope.freq_base=5e5 vocab_size=128256
Llama-3.3-70B-Instruct-Q4_K_M llama llama-bpe 80,8192,28672,64,8,128,128256 marks=factors
Qwen2.5-7B-Instruct-Q4_K_M qwen2 qwen2 28,3584,18944,28,4,128,152064 marks=bias
Qwen2.5-32B-Instruct-Q4_K_M qwen2 qwen2 64,5120,27648,40,8,128,152064 marks=bias
Qwen3-8B-Q4_K_M qwen3 qwen2 36,4096,12288,32,8,128,151936 marks=head_norms,long
Qwen3-30B-A3B-Q4_K_M qwen3moe qwen2 48,2048,6144,32,4,128,151936 marks=head_norms
  experts=[128,8,768,0,0]
Qwen3-235B-A22B-Q4_K_M qwen3moe qwen2 94,4096,12288,64,4,128,151936 marks=head_norms
  experts=[128,8,1536,0,0]
Qwen2.5-VL-7B-Instruct-Q4_K_M qwen2vl qwen2 28,3584,18944,28,4,128,152064 marks=bias
  context_length=128000 rope.dimension_sections=[16,24,24,0]
Qwen3-VL-8B-Instruct-Q4_K_M qwen3vl qwen2 36,4096,12288,32,8,128,151936 marks=head_norms,long
  *qwen3_vl
Qwen3-VL-30B-A3B-Instruct-Q4_K_M qwen3vlmoe qwen2 48,2048,6144,32,4,128,151936 marks=head_norms
  experts=[128,8,768,0,0] *qwen3_vl
Muse-Glimmer-30B-Q4_K_M muse-glimmer llama-bpe 52,6656,19968,32,2,128,202048
  marks=norms_around,head_norms,own_gates,every_fourth_full context_length=131072
  attention.sliding_window=2048 logit_scale=0.19611613513818404 final_logit_softcapping=20.0
  rope.freq_base=5e5 attention.layer_norm_rms_epsilon=1e-05
North-Mini-Code-Q4_K_M cohere2moe command-r 49,2048,3072,32,4,128,262144
  marks=tied,parallel,every_fourth_full experts=[128,8,768,0,1] attention.sliding_window=4096
  logit_scale=0.0625 expert_gating_func=2 expert_weights_norm=false expert_feed_forward_length=768
  rope.scaling.type=none vocab_size=262144
command-a-plus-05-2026-Q4_K_M cohere2moe command-r 32,4096,4096,128,8,128,262144
  marks=tied,parallel,every_fourth_full experts=[128,8,4096,16384,0] attention.sliding_window=4096
  logit_scale=0.0625 expert_gating_func=2 expert_weights_norm=false expert_feed_forward_length=4096
  expert_shared_count=4 expert_shared_feed_forward_length=16384 leading_dense_block_count=0
  rope.scaling.type=none vocab_size=262144 context_length=200000
Qwen3.6-35B-A3B-Q4_K_M qwen35moe qwen35 40,2048,5632,16,2,256,248320 marks=head_norms,delta,second
  experts=[256,8,512,512,0] *delta feed_forward_length=null expert_shared_feed_forward_length=512
Mistral-Nemo-Instruct-2407-Q4_K_M llama tekken 40,5120,14336,32,8,128,131072 context_length=1024000
Mistral-Small-24B-IQ3_XXS llama tekken 40,5120,32768,32,8,128,131072
Mixtral-8x7B-Instruct-v0.1-Q4_K_M llama llama 32,4096,14336,32,8,128,32000 experts=[8,2,14336,0,0]
gemma-2-9b-it-Q4_K_M gemma2 llama 42,3584,14336,16,8,256,256000 marks=tied,norms_around
  attn_logit_softcapping=50.0 final_logit_softcapping=30.0 attention.sliding_window=4096
  context_length=8192 *no_rope
gemma-3-12b-it-Q4_K_M gemma3 llama 48,3840,15360,16,8,256,262208 marks=tied,norms_around,head_norms
  attention.sliding_window=1024 context_length=131072 rope.scaling.type=linear
  rope.scaling.factor=8.0
gemma-3-27b-it-Q4_0 gemma3 llama 62,5376,21504,32,16,128,262208 marks=tied,norms_around,head_norms
  attention.sliding_window=1024 context_length=131072 rope.scaling.type=linear
  rope.scaling.factor=8.0
gemma-4-12b-it-Q4_K_M gemma4 llama 48,3840,15360,16,8,256,262144
  marks=tied,norms_around,head_norms,gemma4,factors,keys_as_values *gemma4
  attention.sliding_window=1024 context_length=262144
gemma-4-E4B-it-Q4_K_M gemma4 llama 42,2560,10240,8,2,256,262144
  marks=tied,norms_around,head_norms,gemma4,factors,inputs *gemma4 attention.sliding_window=512
  context_length=131072
Phi-3.5-mini-instruct-Q4_K_M phi3 llama 32,3072,8192,32,32,96,32064 marks=fused,longrope
  context_length=131072 rope.scaling.original_context_length=4096 rope.scaling.attn_factor=1.19
  attention.sliding_window=262144 rope.freq_base=1e4
phi-4-Q4_K_M phi3 dbrx 40,5120,17920,40,10,128,100352 marks=fused context_length=16384
  attention.sliding_window=0 rope.freq_base=2.5e5
gpt-oss-20b-MXFP4 gpt-oss gpt-4o 24,2880,2880,64,8,64,201088 marks=biases,sinks,expert_biases,second
  experts=[32,4,2880,0,0] *yarn context_length=131072 attention.sliding_window=128
  expert_feed_forward_length=2880 rope.freq_base=1.5e5
GLM-4.5-Air-Q4_K_M glm4moe glm4 46,4096,10944,96,8,128,151552 marks=bias,second,choice_bias
  experts=[128,8,1408,1408,1] expert_shared_count=1 expert_weights_scale=1.0
  expert_weights_norm=true expert_gating_func=2 rope.dimension_count=64 context_length=131072
DeepSeek-R1-Distill-Qwen-7B-Q4_K_M qwen2 deepseek-r1-qwen 28,3584,18944,28,4,128,152064 marks=bias
DeepSeek-R1-Distill-Llama-8B-Q8_0 llama llama-bpe 32,4096,14336,32,8,128,128256 marks=factors
DeepSeek-V3-Q4_K_M deepseek2 deepseek-v3 61,7168,18432,128,1,576,129280 marks=latent,choice_bias
  experts=[256,8,2048,2048,3] *latent *yarn_of_v3 attention.q_lora_rank=1536
  expert_weights_scale=2.5 expert_group_count=8 expert_group_used_count=4
DeepSeek-V3.2-Q4_K_M deepseek32 deepseek-v3 61,7168,18432,128,1,576,129280
  marks=latent,choice_bias,indexed experts=[256,8,2048,2048,3] *latent *yarn_of_v3
  attention.q_lora_rank=1536 expert_weights_scale=2.5 expert_group_count=8
  expert_group_used_count=4 attention.indexer.head_count=64 attention.indexer.key_length=128
  attention.indexer.top_k=2048
GLM-5.1-Q4_K_M glm-dsa glm4 78,6144,12288,64,1,576,154880 marks=latent,choice_bias,indexed
  experts=[256,8,2048,2048,3] *latent attention.q_lora_rank=2048 attention.key_length_mla=256
  attention.value_length_mla=256 attention.layer_norm_rms_epsilon=1e-05 expert_weights_scale=2.5
  context_length=202752 attention.indexer.head_count=32 attention.indexer.key_length=128
  attention.indexer.top_k=2048
DeepSeek-V2-Lite-Chat-Q4_K_M deepseek2 deepseek-llm 27,2048,10944,16,1,576,102400 marks=latent
  experts=[64,6,1408,2816,1] *latent *yarn_of_v3 rope.scaling.yarn_log_multiplier=0.0707
  expert_shared_count=2 expert_weights_norm=null expert_gating_func=null expert_weights_scale=1.0
  vocab_size=102400
Kimi-K2-Instruct-Q4_K_M deepseek2 kimi-k2 61,7168,18432,64,1,576,163840 marks=latent,choice_bias
  experts=[384,8,2048,2048,1] *latent *yarn_of_v3 attention.q_lora_rank=1536
  expert_weights_scale=2.827 expert_group_count=1 expert_group_used_count=1 rope.freq_base=5e4
  rope.scaling.factor=32.0 context_length=131072
GLM-4.7-Flash-Q4_K_M deepseek2 glm4 47,2048,10240,20,1,576,154880 marks=latent,choice_bias
  experts=[64,4,1536,1536,1] *latent attention.q_lora_rank=768 attention.key_length_mla=256
  attention.value_length_mla=256 attention.layer_norm_rms_epsilon=1e-05 expert_weights_scale=1.8
  context_length=202752
Kimi-Linear-48B-A3B-Instruct-Q4_K_M kimi-linear kimi-k2 27,2304,9216,32,1,576,163840
  marks=latent,kimi,choice_bias experts=[256,8,1024,1024,1] *latent attention.value_length=72
  attention.layer_norm_rms_epsilon=1e-05 kda.head_dim=128 ssm.conv_kernel=4
  expert_weights_scale=2.446 context_length=1048576
Mistral-Small-4-119B-Q4_K_M mistral4 tekken 36,4096,12288,32,1,320,131072 marks=latent
  experts=[128,4,2048,2048,0] *latent attention.q_lora_rank=1024 attention.kv_lora_rank=256
  attention.key_length=320 attention.value_length=256 attention.key_length_mla=128
  expert_gating_func=1 rope.freq_base=1e4 rope.scaling.type=yarn rope.scaling.factor=128.0
  rope.scaling.original_context_length=8192 rope.scaling.yarn_log_multiplier=0.1
  attention.temperature_scale=0.1 attention.temperature_length=8192 context_length=1048576
MiniCPM3-4B-Q4_K_M minicpm3 llama 62,2560,6400,40,40,96,73448 marks=latent,longrope,tied
  attention.q_lora_rank=768 attention.kv_lora_rank=256 attention.value_length=null
  attention.layer_norm_rms_epsilon=1e-05 rope.dimension_count=32 rope.freq_base=null
c4ai-command-r-v01-Q4_K_M command-r command-r 40,8192,22528,64,64,128,256000 marks=tied,parallel
  logit_scale=0.0625 context_length=131072 rope.freq_base=8e6 attention.layer_norm_epsilon=1e-05
  attention.layer_norm_rms_epsilon=null rope.scaling.type=none
OLMo-2-1124-7B-Instruct-Q4_K_M olmo2 dbrx 32,4096,11008,32,32,128,100352
  marks=norms_after,wide_norms context_length=4096 rope.freq_base=5e5
granite-4.0-h-small-Q4_K_M granitehybrid dbrx 40,4096,768,32,8,128,100352 marks=tied,mamba
  experts=[72,10,768,1536,0] ssm.conv_kernel=4 ssm.state_size=128 ssm.group_count=1
  ssm.inner_size=8192 ssm.time_step_rank=128 expert_shared_feed_forward_length=1536
  attention.scale=0.0078125 embedding_scale=12.0 residual_scale=0.22 logit_scale=16.0
  rope.scaling.finetuned=false
Nemotron-3-Nano-30B-A3B-Q4_K_M nemotron_h_moe tekken 52,2688,1856,32,2,128,131072
  marks=mamba,single,no_gate,choice_bias experts=[128,6,1856,3712,0] ssm.conv_kernel=4
  ssm.state_size=128 ssm.group_count=8 ssm.inner_size=4096 ssm.time_step_rank=64
  attention.layer_norm_epsilon=1e-05 rope.dimension_count=84 expert_feed_forward_length=1856
  expert_shared_feed_forward_length=3712 expert_shared_count=1 expert_weights_norm=true
  expert_weights_scale=2.5 expert_group_count=1 context_length=1048576
Nemotron-3-Super-120B-A12B-Q4_K_M nemotron_h_moe tekken 88,4096,2688,32,2,128,131072
  marks=mamba,single,no_gate,choice_bias experts=[512,22,2688,5376,0] ssm.conv_kernel=4
  ssm.state_size=128 ssm.group_count=8 ssm.inner_size=8192 ssm.time_step_rank=128
  attention.layer_norm_epsilon=1e-05 expert_feed_forward_length=2688 moe_latent_size=1024
  expert_shared_feed_forward_length=5376 expert_shared_count=1 expert_weights_norm=true
  expert_weights_scale=5.0 expert_group_count=1 context_length=262144
Falcon-H1-7B-Instruct-Q4_K_M falcon-h1 falcon3 44,3072,12288,12,2,128,130048 marks=both
  ssm.conv_kernel=4 ssm.state_size=256 ssm.group_count=1 ssm.inner_size=3072 ssm.time_step_rank=24
jamba-v0.1-Q4_K_M jamba llama 1,4096,14336,32,8,128,65536
Falcon3-7B-Instruct-Q4_K_M llama falcon3 28,3072,23040,12,4,256,131072
starcoder2-7b-Q4_K_M starcoder2 starcoder 32,4608,18432,36,4,128,49152
  marks=biases,no_gate,norm_bias context_length=16384 attention.layer_norm_epsilon=1e-05
  attention.layer_norm_rms_epsilon=null
SmolLM2-1.7B-Instruct-Q4_K_M llama smollm 24,2048,8192,32,32,64,49152 marks=tied
  rope.freq_base=1.3e5
SmolLM3-3B-Q4_K_M smollm3 smaug-bpe 36,2048,11008,16,4,128,128256 marks=tied rope.freq_base=5e6
  context_length=65536
ERNIE-4.5-21B-A3B-PT-Q4_K_M ernie4_5-moe llama 28,2560,12288,20,4,128,103424 marks=tied,choice_bias
  experts=[64,6,1536,3072,1] expert_shared_count=2 expert_shared_feed_forward_length=3072
  interleave_moe_layer_step=1 context_length=131072 rope.freq_base=5e5
LFM2-1.2B-Q4_K_M lfm2 lfm2 16,2048,8192,32,8,64,65536 marks=tied,head_norms,conv *lfm2
LFM2-8B-A1B-Q4_K_M lfm2moe lfm2 24,2048,7168,32,8,64,65536 marks=tied,head_norms,conv,choice_bias
  experts=[32,4,1792,0,2] *lfm2 expert_gating_func=2
bge-m3-Q8_0 bert llama 1,1024,4096,16,16,64,250002
mmproj-gemma-3-12b-it-f16 clip llama 1,1152,4304,16,16,72,1 general.type=mmproj
  clip.has_vision_encoder=true
llama-3.1-8b-lora-F16 llama llama 1,4096,14336,32,8,128,128256 general.type=adapter
  adapter.type=lora adapter.lora.alpha=16.0
Llama-3.1-8B-TQ1_0 llama llama-bpe 32,4096,14336,32,8,128,128256
Qwen2.5-32B-Instruct-IQ2_XXS qwen2 qwen2 64,5120,27648,40,8,128,152064 marks=bias
Qwen3.8-27B-UD-Q2_K_XL qwen35 qwen35 64,5120,17408,24,4,256,248320 marks=head_norms,delta,second
  *delta ssm.inner_size=6144 ssm.time_step_rank=48
MiniMax-M2-Q4_K_M minimax-m2 minimax-m2 62,3072,1536,48,8,128,200064 marks=wide_norms,choice_bias
  experts=[256,8,1536,0,0] context_length=196608 rope.freq_base=5e6 rope.dimension_count=64
  expert_feed_forward_length=1536 expert_gating_func=2
Seed-OSS-36B-Instruct-Q4_K_M seed_oss seed-coder 64,5120,27648,80,8,128,155136 marks=bias,second
  context_length=524288 rope.freq_base=1e7
Hunyuan-7B-Instruct-Q4_K_M hunyuan-dense hunyuan-dense 32,4096,14336,32,8,128,128167
  marks=tied,head_norms,long *hunyuan
Hunyuan-A13B-Instruct-Q4_K_M hunyuan-moe hunyuan 32,4096,3072,32,8,128,128167 marks=tied,head_norms
  experts=[64,8,3072,3072,0] *hunyuan expert_feed_forward_length=3072
  expert_shared_feed_forward_length=3072 expert_shared_count=1
Hy3-Q4_K_M hy_v3 hunyuan 80,4096,13312,64,8,128,120832 marks=head_norms,choice_bias
  experts=[192,8,1536,1536,1] *sigmoid context_length=131072 rope.freq_base=11158840.0
  expert_shared_feed_forward_length=1536 expert_weights_scale=2.826 leading_dense_block_count=null
dots.llm1.inst-Q4_K_M dots1 qwen2 62,4096,10944,32,32,128,152064 marks=head_norms,choice_bias
  experts=[128,6,1408,2816,1] *sigmoid expert_shared_count=2 expert_weights_scale=2.5
Solar-Open-100B-Q4_K_M glm4moe solar-open 48,4096,10240,64,8,128,196608 marks=second,choice_bias
  experts=[128,8,1280,1280,0] *sigmoid context_length=131072 expert_shared_count=1
  expert_weights_scale=1.0
Ling-mini-2.0-Q4_K_M bailingmoe2 bailingmoe2 20,2048,5120,16,4,128,157184
  marks=fused_qkv,head_norms,choice_bias experts=[256,8,512,512,1] *sigmoid rope.freq_base=6e5
  rope.dimension_count=64 vocab_size=157184 expert_shared_feed_forward_length=512
  expert_shared_count=1 expert_weights_scale=2.5 expert_group_count=8 expert_group_used_count=4
granite-4.0-micro-Q4_K_M granite dbrx 40,2560,8192,40,8,64,100352 marks=tied context_length=131072
  rope.freq_base=1e7 attention.layer_norm_rms_epsilon=1e-05 embedding_scale=12.0 residual_scale=0.22
  attention.scale=0.015625 logit_scale=10.0 ssm.conv_kernel=4 ssm.state_size=128 ssm.group_count=1
  ssm.inner_size=5120 ssm.time_step_rank=64 expert_count=0 expert_used_count=0
  expert_shared_feed_forward_length=8192 rope.scaling.finetuned=true
gemma-2b-it-Q4_K_M gemma llama 18,2048,16384,8,1,256,256000 marks=tied,long context_length=8192
  *no_rope
stablelm-2-zephyr-1_6b-Q4_K_M stablelm stablelm2 24,2048,5632,32,32,64,100352 marks=bias,norm_bias
  *layer_norms context_length=4096 rope.dimension_count=16 use_parallel_residual=false
pythia-1.4b-Q8_0 gptneox olmo 24,2048,8192,16,16,128,50304 marks=fused_qkv,biases,no_gate,norm_bias
  *layer_norms context_length=2048 rope.dimension_count=32 attention.head_count_kv=null
  use_parallel_residual=true
phi-2-Q4_K_M phi2 phi-2 32,2560,10240,32,32,80,51200
  marks=biases,no_gate,norm_bias,parallel,head_bias *layer_norms context_length=2048
  rope.dimension_count=32
internlm2_5-7b-chat-Q4_K_M internlm2 llama 32,4096,14336,32,8,128,92544
"""
# What `plan` says, or, without a semicolon before it, why it refuses.
_WORDS = {
    "jamba-v0.1-Q4_K_M": "recurrent",
    "bge-m3-Q8_0": "an encoder",
    "mmproj-gemma-3-12b-it-f16": "images",
    "llama-3.1-8b-lora-F16": "an adapter",
}


def _keys(words: Sequence[str], shared: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for word in words:
        if word.startswith("*"):
            found |= shared[word]
            continue
        key, _, value = word.partition("=")
        is_word = value[0].isalpha() and value not in ("true", "false", "null")
        found[key] = value if is_word else json.loads(value)
    return found


def _headers() -> Iterator[Header]:
    shared: dict[str, Mapping[str, object]] = {"*gemma4": _GEMMA4}
    for line in _SHARED.replace("\n  ", " ").strip().splitlines():
        base, *words = line.split()
        shared[base] = _keys(words, shared)
    for line in _TABLE.replace("\n  ", " ").strip().splitlines():
        name, architecture, pre, sizes, *words = line.split()
        keys = _keys(words, shared) | _OF_LAYERS.get(name, {})
        said = _WORDS.get(name, ";")
        yield Header(
            name=name,
            architecture=architecture,
            sizes=tuple(map(int, sizes.split(","))),
            words=said if name in _WORDS else "",
            is_refused=not said.startswith(";"),
            pre=pre,
            kind="ud-q2_k_xl" if "UD-Q2_K_XL" in name else name.rsplit("-", 1)[1].lower(),
            marks=str(keys.pop("marks", "")).replace(",", " "),
            experts=tuple(keys.pop("experts", (0,) * 5)),
            keys=keys,
        )


HEADERS = tuple(_headers())

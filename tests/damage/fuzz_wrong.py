"""Tables of invalid content: each maps the name of an error to the change that produces it.

A change edits in place: values (metadata of safetensors, keys of GGUF, an object of JSON) and
arrays. The result is forbidden by docs/formats.md, contradicts itself, or is of a kind that
hotsplit does not support. fuzz_meaning reads and writes the files."""

import math
import random
from collections.abc import Callable

import numpy as np

NAN, INF = math.nan, math.inf
NOT_COUNTS = (-1, 1.5, True, "1", None, [], {}, 2**63, 10**30)
NOT_SIZES = (0, -1, 1.5, "x", [], {}, 10**30, 10**9)
NOT_TEXTS = (None, 0, True, [], {}, ["x"])
NOT_SHARES = (-0.5, 1.5, 1e9, INF, -INF, NAN, "x", None, True)

OPTIONAL = {"quality", "arithmetic", "__metadata__", "quartiles", "rounds", "pass_rows_gb_per_s"}
OPTIONAL |= {"input_layer_offset", "density_L", "thresholds", "rope_scaling"}

Change = Callable[[random.Random, dict, dict], None]

# ------------------------------------------------------------------ changes


def one_of(key: str, *wrong: object) -> Change:
    """Sets a value to one of `wrong`. Slashes in the key lead into objects; * is any element."""

    def change(rng: random.Random, values: dict, arrays: dict) -> None:
        holder, last = _place(rng, values, key)
        present = holder.get(last) if isinstance(holder, dict) else holder[last]
        # "a" instead of "a" would be no change
        holder[last] = rng.choice([w for w in wrong if not (isinstance(w, str) and w == present)])

    return change


def yarn_with(key: str, *wrong: object) -> Change:
    """Turns YaRN on, with one of these values for one of its keys."""
    change_one = one_of(f"llama.{key}", *wrong)

    def change(rng: random.Random, values: dict, arrays: dict) -> None:
        values |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": np.float32(4)}
        change_one(rng, values, arrays)

    return change


def without(key: str) -> Change:
    def change(rng: random.Random, values: dict, arrays: dict) -> None:
        holder, last = _place(rng, values, key)
        del holder[last]

    return change


def _place(rng: random.Random, values: dict, key: str) -> tuple:
    holder, parts = values, key.split("/")
    for number, part in enumerate(parts):
        key_of = rng.randrange(len(holder)) if part == "*" and isinstance(holder, list) else part
        if part == "*" and isinstance(holder, dict):
            key_of = rng.choice(sorted(holder.keys() - OPTIONAL))
        if number == len(parts) - 1:
            return holder, key_of
        holder = holder[key_of]
    raise AssertionError(key)


def element(name: str, *wrong: float) -> Change:
    """Sets a random element of a random array whose name ends with `name`."""

    def change(rng: random.Random, values: dict, arrays: dict) -> None:
        found = rng.choice(sorted(n for n in arrays if n.endswith(name)))
        array = arrays[found] = np.array(arrays[found])
        array.reshape(-1)[rng.randrange(array.size)] = rng.choice(wrong)

    return change


def array(name: str, edit: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(rng: random.Random, values: dict, arrays: dict) -> None:
        found = rng.choice(sorted(n for n in arrays if n.endswith(name)))
        arrays[found] = np.ascontiguousarray(edit(np.array(arrays[found])))

    return change


def more(name: str) -> Change:
    def change(rng: random.Random, values: dict, arrays: dict) -> None:
        arrays[name] = np.ones(4, np.float32)

    return change


def lacking(name: str) -> Change:
    def change(rng: random.Random, values: dict, arrays: dict) -> None:
        del arrays[rng.choice(sorted(n for n in arrays if n.endswith(name)))]

    return change


def _shapes(name: str) -> dict[str, Change]:
    """Changes to the shape or type of an array."""
    return {
        f"{name} one row less": array(name, lambda a: a[:-1] if len(a) > 1 else a[:0]),
        f"{name} one row more": array(name, lambda a: np.concatenate([a, a[:1]])),
        f"{name} with another axis": array(name, lambda a: a[None]),
        f"{name} empty": array(name, lambda a: a[:0]),
        f"{name} as f64": array(name, lambda a: a.astype(np.float64)),
        f"{name} as i8": array(name, lambda a: a.astype(np.int8)),
    }


def _wrapped(rng: random.Random, values: dict, arrays: dict) -> None:
    """Makes a sum right only because it overflows."""
    row = arrays["gate_histogram_LB"][0]
    for place in rng.sample(range(1, len(row)), 4):
        row[place] = 1 << 62


def _moved(rng: random.Random, values: dict, arrays: dict) -> None:
    """Makes a bin negative while the sum stays right."""
    row, count = arrays["gate_histogram_LB"][0], rng.randrange(1, 1 << 40)
    first, second = rng.sample(range(len(row)), 2)
    row[first] -= count + row[first]
    row[second] += count
    row[0] += values["num_tokens"] * arrays["active_count_LF"].shape[1] - row.sum()


def _swapped(rng: random.Random, values: dict, arrays: dict) -> None:
    """Lists a tensor under the wrong file."""
    files = values["weight_map"]
    name = rng.choice(sorted(files))
    files[name] = next(file for file in sorted(set(files.values())) if file != files[name])


QUALITY = {
    "quality of an unknown mode": one_of("quality/dense", {}),
    "quality lacks a value": without("quality/*/*"),
    "quality of more values": one_of("quality/exact/other", 1),
    "quality: no share": one_of("quality/exact/top1_agreement", *NOT_SHARES),
    "quality: no increase": one_of("quality/exact/perplexity_increase", -1.0, -2.0, NAN, INF, "x"),
    "quality: no width": one_of("quality/exact/perplexity_half_width", -0.1, NAN, INF, None),
    "quality: no divergence": one_of("quality/exact/kl_mean", -1e-9, NAN, INF, True),
    "quality: no count": one_of("quality/exact/num_tokens", 0, *NOT_COUNTS),
    "quality: no bytes": one_of("quality/exact/bytes_per_token", 0, *NOT_COUNTS),
    "quality: no sha256": one_of("quality/exact/corpus_sha256", *NOT_TEXTS),
}
PROFILE = {
    "count below 0": element("active_count_LF", -1, -(1 << 62)),
    "count above the tokens": element("active_count_LF", 10_001, 1 << 62),
    "histogram below 0": element("gate_histogram_LB", -1, -(1 << 40)),
    "histogram that does not sum": element("gate_histogram_LB", 1, 7, 1 << 40),
    "histogram below 0 that sums": _moved,
    "histogram that overflows": _wrapped,
    **_shapes("active_count_LF"),
    **_shapes("gate_histogram_LB"),
    "invalid threshold": one_of("threshold_L/*", -0.1, NAN, INF, "x", None, True),
    "more thresholds than layers": one_of("threshold_L", [], [0.0] * 9, 0.0, None),
    "invalid tokens": one_of("num_tokens", 0, *NOT_COUNTS),
    "more tokens than are counted": one_of("num_tokens", 2**62),
    "another number of tokens": one_of("num_tokens", 9_999, 10_001),
    "invalid model_id": one_of("model_id", "a\nb", *NOT_TEXTS),
    "invalid corpora": one_of("corpora", None, {}, "x", [1], [{}]),
    "corpus of another value": one_of("corpora/*/name", *NOT_TEXTS),
    "corpus without tokens": one_of("corpora/*/num_tokens", *NOT_COUNTS),
    "corpus lacks a value": without("corpora/*/*"),
    "another version": one_of("version", "99", "0", "x", ""),
    "another format": one_of("format", "hotsplit.limits", ""),
    "an unknown key": one_of("other", 1),
    "a key is missing": without("*"),
    "an unknown array": more("other"),
    "an array is missing": lacking("L" + "F"),
    **QUALITY,
}
PREDICTORS = {
    "invalid density": one_of("info/density_L/*", *NOT_SHARES),
    "densities of some layers": one_of("info/density_L", [0.5] * 2, 0.5, None),
    "invalid threshold": one_of("info/threshold_L/*", NAN, "x", None, True),
    "thresholds of no layer": one_of("info/threshold_L", [], [0.0] * 2, 0.0),
    "another rank": one_of("info/rank_L/*", 0, 3, 5, *NOT_COUNTS),
    "unknown kind": one_of("info/kind", "tanh", "", *NOT_TEXTS),
    "another offset": one_of("info/input_layer_offset", 2, *NOT_COUNTS),
    "types of no layer": one_of("matrix_kind_L", [], [None] * 2, None, "f16"),
    "unknown type": one_of("matrix_kind_L/*", "q9_0", "i8", 1, True, "F16"),
    "type that the array has not": one_of("matrix_kind_L/*", "f16", "q8_0", "q4_0"),
    "another model": one_of("model_id", "0" * 64, "", 0, [], {}),
    "weights that are not finite": element(".weight", NAN, INF, -INF),
    "bias that no neuron has": more("blk.0.ffn_pred_up.bias"),
    "a layer that is not there": more("blk.1.ffn_pred_up.weight"),
    "weights in one row": array(".weight", lambda a: a.reshape(-1)),
    "no up": lacking("up.weight"),
    "no down": lacking("down.weight"),
    **_shapes("up.weight"),
    **_shapes("down.weight"),
    "another version": one_of("version", "99", "1", "x"),
    "an unknown key": one_of("other", 1),
    "info lacks a value": without("info/*"),
    "info with more": one_of("info/other", 1),
    "a key is missing": without("*"),
    **QUALITY,
}
NOT_QUARTILES = ([1, 2], [3, 2, 1], [1, NAN, 2], [0, 1, 2], [-1, 1, 2], "x", [1, 2, 3], [], 0)
FIGURES = (
    "gpus/*/bandwidth_gb_per_s",
    "gpus/*/launch_s",
    "cpu_bandwidth_gb_per_s/*",
    "cpu_costs/all_rows_gb_per_s/*",
    "cpu_costs/layer_s/*",
    "cpu_costs/token_s",
)
MACHINE = {
    **{
        f"{f}: no rate": one_of(f"{f}/best", 0, -1.0, NAN, INF, 1e19, 1e-19, "x", None, True)
        for f in FIGURES
    },
    **{f"{f}: no quartiles": one_of(f"{f}/quartiles", *NOT_QUARTILES) for f in FIGURES},
    **{f"{f}: rounds of nothing": one_of(f"{f}/rounds", 1, *NOT_COUNTS) for f in FIGURES},
    **{f"{f}: with more": one_of(f"{f}/other", 1) for f in FIGURES},
    **{f"{f}: without a value": without(f"{f}/*") for f in FIGURES},
    "a launch of years": one_of("gpus/*/launch_s/best", 1001.0, 1e9, 2**53),
    "a layer of years": one_of("cpu_costs/layer_s/*/best", 1001, 1e9, 1e18),
    "free memory above all": one_of("free_bytes", 1 << 60, *NOT_COUNTS),
    "a card's free memory above all": one_of("gpus/*/free_bytes", 1 << 60, 0, *NOT_COUNTS),
    "no memory": one_of("memory_bytes", 0, *NOT_COUNTS),
    "no threads": one_of("num_threads", 0, *NOT_COUNTS),
    "no CPU figures": one_of("cpu_bandwidth_gb_per_s", {}, [], None),
    "figures by no threads": one_of("cpu_bandwidth_gb_per_s/x", {}, 1),
    "a card without a name": one_of("gpus/*/name", "a\nb", *NOT_TEXTS),
    "invalid cards": one_of("gpus", None, {}, [1], "x"),
    "invalid versions": one_of("versions", None, [], {"torch": 1}, "x"),
    "another version": one_of("version", 3, 6, "5", 4.5, None, [5]),
    "another format": one_of("format", "x", None, ["hotsplit.machine"]),
    "an unknown key": one_of("other", 1),
    "a key is missing": without("*"),
}
I32 = np.int32


def _twice(ids: np.ndarray) -> np.ndarray:
    ids[1] = ids[0]
    return ids


S = "hotsplit.split."
PLAN = {
    "a neuron twice": array("ffn_hot", _twice),
    "a neuron below 0": element("ffn_hot", -1, -(1 << 31)),
    "a neuron that is not there": element("ffn_hot", 32, (1 << 31) - 1),
    "neurons as numbers": array("ffn_hot", lambda a: a.astype(np.float32)),
    "neurons in two rows": array("ffn_hot", lambda a: np.stack([a, a + 9])),
    "one neuron less": array("ffn_hot", lambda a: a[:-1]),
    "no neurons": lacking("ffn_hot"),
    "an unknown tensor": more("blk.0.ffn_cold"),
    "another count": one_of(S + "hot_count", [8], [10], [0], [-1], [9, 0], [], "9"),
    "no flags of blocks": one_of(S + "dense_on_gpu", [0], [2], [-1], [1, 1], [], [0.5]),
    "a head on the CPU": one_of(S + "head_on_gpu", False, np.uint32(1), "true"),
    "other GPU bytes": one_of(
        S + "gpu_bytes.neurons", np.uint64(0), np.uint64(1), "x", np.int64(-1)
    ),
    "other CPU bytes": one_of(S + "cpu_bytes.neurons", np.uint64(0), np.uint64(1), [1]),
    "bytes of no size": one_of(S + "gpu_bytes.kv_cache", np.uint64(2**64 - 1), np.float32(1)),
    "a smaller budget": one_of(S + "vram_budget_bytes", np.uint64(0), np.uint64(9), np.int64(-1)),
    "another context": one_of(S + "context_length", np.uint32(0), np.uint32(64), np.uint32(2**31)),
    "unknown mode": one_of(S + "mode", "fast", "predicted", np.uint32(1)),
    "another model": one_of(S + "model_id", "0" * 64, np.uint32(1)),
    "no objective": one_of(S + "objective_s", *map(np.float64, (0, -1, NAN, INF)), "x"),
    "a bound above the plan": one_of(S + "bound_s", *map(np.float64, (2, -1, NAN, INF))),
    "no seconds": one_of(S + "solve_s", *map(np.float64, (-1, NAN, INF)), True),
    "a smaller host": one_of(S + "host_budget_bytes", np.uint64(1), "x", np.float32(0)),
    "no status": one_of(S + "status", np.uint32(1), [1], True),
    "homes without budgets": one_of(S + "home", [0, 0], [0], [-1, 0]),
    "budgets without homes": one_of(S + "gpu_budget_bytes", ["1"], [1]),
    "another version": one_of(S + "version", np.uint32(99), np.uint32(0), "3", np.float32(3)),
    "one rate of prompts": one_of(S + "prompt.token_s", *map(np.float64, (0, 1e-10, -1, NAN)), "x"),
    "half of a cache": without(S + "cache.rest_s"),
    "a cache's other memory": one_of(S + "gpu_bytes.neuron_cache", np.uint64(1), np.int64(-1), "x"),
    "another architecture": one_of("general.architecture", "llama", "hotsplit"),
    "an unknown key": one_of(S + "other", np.uint32(1)),
    "a key is missing": without(S + "objective_s"),
}
P = "hotsplit.predictor."
MODEL = {
    "invalid model_id": one_of("hotsplit.model_id", "a\nb", "\0"),
    "invalid density": one_of(P + "density", [-0.5], [1.5], [INF], [NAN], [0.5, 0.5]),
    "invalid threshold": one_of(P + "threshold", [NAN], [0.0, 0.0], np.float32(0), "x", ["x"]),
    "another rank": one_of(P + "rank", [0], [3], [-1], [0.5], [4, 4], "4"),
    "another kind": one_of(P + "kind", "tanh", np.uint32(1), "relu\n"),
    "another offset": one_of(P + "input_layer_offset", np.uint32(2), np.int32(-1), "0", True),
    "neurons' threshold": one_of("hotsplit.ffn.threshold", [-0.1], [NAN], [INF], [0, 0]),
    "another activation": one_of("hotsplit.ffn.activation", "silu", "tanh", np.uint32(1)),
    "invalid norms": one_of("hotsplit.is_post_norm", True, np.uint32(1), "x", [True]),
    "limits of gates": one_of("hotsplit.limits.trained", True),
    "an unknown key of ours": one_of("hotsplit.other", np.uint32(1), False),
    "an unknown key of the graph": one_of("llama.other", np.uint32(1), True, "x"),
    "another version": one_of("hotsplit.version", np.uint32(99), np.uint32(0), "1"),
    "heads in no groups": one_of("llama.attention.head_count", np.uint32(0), np.uint32(3), "4"),
    "other key heads": one_of("llama.attention.head_count_kv", np.uint32(0), np.uint32(3)),
    "other layers": one_of("llama.block_count", np.uint32(0), np.uint32(2), np.float32(0.5)),
    "another width": one_of("llama.embedding_length", np.uint32(0), np.uint32(64), "32"),
    "other neurons": one_of("llama.feed_forward_length", np.uint32(0), np.uint32(31)),
    "no context": one_of("llama.context_length", np.uint32(0), np.float32(1.5), np.int32(-1)),
    "no epsilon": one_of(
        "llama.attention.layer_norm_rms_epsilon", *map(np.float32, (0, -1, NAN, INF)), "x"
    ),
    "no base": one_of("llama.rope.freq_base", *map(np.float32, (0, -1, NAN, INF)), "x"),
    "no factor": one_of("llama.rope.scaling.type", "yarn", np.uint32(1), "linear"),
    "YaRN by nothing": yarn_with("rope.scaling.factor", *map(np.float32, (0, -1, NAN, INF)), "x"),
    "YaRN of no length": yarn_with("rope.scaling.original_context_length", np.uint32(0), "x"),
    "YaRN of another kind": yarn_with("rope.scaling.yarn_ext_factor", np.float32(0.5), "x"),
    "YaRN without borders": yarn_with("rope.scaling.yarn_beta_fast", np.float32(0), "x"),
    "YaRN without magnitude": yarn_with("rope.scaling.attn_factor", np.float32(-1), [1]),
    "a magnitude without YaRN": one_of("llama.rope.scaling.attn_factor", np.float32(1.2), "x"),
    "YaRN of one frequency": yarn_with("rope.freq_base", np.float32(1), np.float32(0.5)),
    "looks ahead": one_of("llama.attention.causal", False, np.uint32(1), "x"),
    "end that the model has not": one_of(
        "tokenizer.end_token_ids", [300], [-1], [0, 99999], ["x"], [0.5], "x", np.float32(1)
    ),
    "eos that is no number": one_of("tokenizer.ggml.eos_token_id", "x", [0], np.float32(0), True),
    "bos that is no number": one_of("tokenizer.ggml.bos_token_id", "x", [0], np.float32(0), True),
    "invalid tokenizer": one_of(
        "tokenizer.huggingface.json", "{", "{}", "[]", "null", '{"model": {}}', ["x"], np.uint32(1)
    ),
    "a tensor of another layer": more("blk.1.attn_norm.weight"),
    "no norm": lacking("attn_norm.weight"),
    "norm of another width": array("attn_norm.weight", lambda a: a[:-1]),
    "quality lacks values": without("hotsplit.quality.exact.kl_mean"),
}
THEIRS = {
    "a merge of no tokens": one_of(
        "tokenizer.ggml.merges/*", "zz y", "a", "", " ", "a b c", "a zz"
    ),
    "a token of other bytes": one_of("tokenizer.ggml.tokens/*", "\udcb2a"),
    "tokens twice": one_of("tokenizer.ggml.tokens/*", "a", "b"),
    "invalid tokens": one_of("tokenizer.ggml.tokens", [1, 2], "x", np.uint32(1), ["a"]),
    "other types": one_of("tokenizer.ggml.token_type", [1], "x", np.uint32(1), ["x"] * 300),
    "another kind": one_of("tokenizer.ggml.model", "bert", "t5", np.uint32(1), ["gpt2"]),
    "another split": one_of("tokenizer.ggml.pre", "other", np.uint32(1), "x" * 5000),
    "eos that is no number": one_of("tokenizer.ggml.eos_token_id", "x", True),
    "bos that is no number": one_of("tokenizer.ggml.bos_token_id", "x", [0]),
    "invalid flag": one_of("tokenizer.ggml.add_bos_token", np.uint32(1), "true", [True]),
}
SIZES = "num_hidden_layers hidden_size vocab_size"
SIZES += " intermediate_size num_attention_heads num_key_value_heads"
CONFIG = {
    **{f"invalid {key}": one_of(key, *NOT_SIZES) for key in SIZES.split()},
    "no epsilon": one_of("rms_norm_eps", 0, -1, "x", [], 10**400),
    "unknown activation": one_of("hidden_act", "x", "x" * 100_000, 1, None, ["silu"], "mish"),
    "unknown architecture": one_of("architectures", [], None, ["x"], ["x" * 100_000], "x", {}),
    "unknown rotation": one_of(
        "rope_scaling",
        *({"rope_type": kind} for kind in ("yarn", "linear", "x" * 9999)),
        1,
        "x",
        [1],
    ),
    "looks ahead": one_of("is_causal", False, "x" * 100_000, 0),
    "packed": one_of("quantization_config", {"x": "y" * 100_000}, 1, "gptq"),
    "invalid eos": one_of("eos_token_id", -1, 1.5, "x", [0, "x"], [0, -1], True, {}),
    "invalid bos": one_of("bos_token_id", -1, 1.5, "x", [0], True, {}),
    "invalid pad": one_of("pad_token_id", -1, 1.5, "x", [0], True, {}),
}
SPECIAL = {
    "invalid name": one_of("eos_token", 1, True, [], {}, ["x"], {"content": 1}),
    "invalid begin": one_of("bos_token", 1, False, [0], {"content": None}),
    "invalid unknown": one_of("unk_token/content", 1, None, [], True),
    "invalid flag": one_of("add_bos_token", "yes", 1, 0, [], {}, "true"),
    "invalid end flag": one_of("add_eos_token", "no", 1, 0, []),
    "invalid template": one_of("chat_template", 1, True, {}, [1], [{}], [["x", "y"]]),
    "template without a name": one_of("chat_template/*/name", 1, None, "", [], True),
    "template of no text": one_of("chat_template/*/template", 1, None, [], {}, True),
}
TOKENIZER = {
    "unknown normalizer": one_of("normalizer", {"type": "x"}, 1, "NFC", []),
    "unknown splitter": one_of("pre_tokenizer", {"type": "x"}, 1, [], {"type": "Split"}),
    "unknown decoder": one_of("decoder", {"type": "x"}, 1, "x"),
    "unknown processor": one_of("post_processor", {"type": "x"}, 1, "x"),
    "invalid added token": one_of("added_tokens/*/content", 1, None, [], {}, True),
    "added token of no number": one_of("added_tokens/*/id", -1, 1.5, "x", None, True),
    "invalid added tokens": one_of("added_tokens", 1, "x", {"a": 0}, ["x"]),
    "merge of no tokens": one_of("model/merges/*", "zz y", ["zz", "y"], ["a"], "a", 1, None, []),
    "invalid merges": one_of("model/merges", 1, "x", {}, None),
    "token of no number": one_of("model/vocab/*", -1, 1.5, "x", None, True, 2**32, 10**9, 2**31),
    "no vocabulary": one_of("model/vocab", 1, "x", None, [["a", 0.5]]),
    "unknown model": one_of("model", 1, "x", {}, None, {"type": "x"}),
    "another version": one_of("version", "9.0", 1),
    "invalid unknown token": one_of("model/unk_token", 1, [], {}),
    "dropout": one_of("model/dropout", "x", 2.0, -1.0),
}
WEIGHTS = {
    "bytes of two": one_of("*/data_offsets", [0, 4], [0, 132], [0, 38396]),
    "bytes after the end": one_of("*/data_offsets", [1 << 40, (1 << 40) + 128], [-4, 0], [4, 0]),
    "invalid bytes": one_of("*/data_offsets", [], [0], "x", None, [0, 4, 8], [0.0, 4.0]),
    "more values than bytes": one_of("*/shape", [7], [1 << 62, 4], [2**32, 2**32], [1 << 64]),
    "invalid sizes": one_of("*/shape", [-1], ["x"], None, "x", [1.5], [[1]]),
    "another type": one_of("*/dtype", "F64", "I8", "BOOL", "F8_E4M3", "x", None, 1, "f32"),
    "invalid tensor": one_of("*", None, [], {}, "x", 1),
    "a tensor without a type": without("*/*"),
    "a tensor is missing": without("*"),
    "a tensor of the same bytes": one_of(
        "other", {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    ),
}
INDEX = {
    "another file": one_of(
        "weight_map/*",
        *["model-9.safetensors", ".", "..", "../x", "/", "\x00", "config.json"],
        "",
        "x" * 5000,
    ),
    "the other file": _swapped,
    "invalid file": one_of("weight_map/*", None, 1, [], {}),
    "no files": one_of("weight_map", None, [], {}, "x"),
    "a tensor is missing": without("weight_map/*"),
    "a tensor more": one_of("weight_map/other", "model-0.safetensors"),
    "no list": without("weight_map"),
}
PROMPT = {
    "tokens that the model has not": element("ids", 300, -1, 1 << 40),
    **_shapes("ids"),
    **_shapes("key.0"),
    "values of no layer": lacking("value.0"),
    "no tokens": lacking("ids"),
    "another layer": more("key.1"),
    "another model": one_of("model_id", "0" * 64, None, 0),
    "other weights": one_of("weights", "0" * 64, None, []),
    "another mode": one_of("mode", "exact", "x", None),
    "other arithmetic": one_of("arithmetic", "other", None),
    "another vocabulary": one_of("vocab_size", 299, "300", None, [300]),
    "other thresholds": one_of("thresholds", [], [0.5], None, "x", [0.0, 0.0]),
    "another version": one_of("version", "99", "x"),
    "an unknown key": one_of("other", 1),
    "a key is missing": without("*"),
}
RESUME = {
    "another place": one_of("phase", 2, -1, True, "1", None, 1.0),
    "another window": one_of("done", 3, -1, True, "2", None, 2.0),
    "another run": one_of("settings/*", "other", [], {}, -1),
    "a run of another version": one_of("settings/other", 1),
    "a setting is missing": without("settings/*"),
    "no settings": one_of("settings", None, [], "x", {}),
    "another digest": one_of("digest", "0" * 128, "", None, 0),
    "another value": element("train/x", 2.0, NAN),
    "another array": more("counter/other"),
    "an array is missing": lacking("x"),
    **{name: change for name, change in _shapes("train/x").items() if "f64" not in name},
}

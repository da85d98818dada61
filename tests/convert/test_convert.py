"""convert/: written files equal the checkpoint, and wrong input is refused in one line.

Oracles: the checkpoint's own tensors, gguf's block formats, transformers' logits and rotary
frequencies, the tokenizers library."""

import dataclasses
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_dejavu, random_llama
from gguf.quants import dequantize, quantize
from reference import rel_error
from safetensors.torch import load_file, save_file
from texts import (
    LLAMA3_SPLIT,
    QWEN2_SPLIT,
    QWEN35_SPLIT,
    byte_level_tokenizer,
    merge_by_score,
    sentencepiece_tokenizer,
)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as token_models
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hotsplit.artifacts.model_file import Layout, ModelFile, PredictorInfo
from hotsplit.artifacts.model_gguf import compute_model_id
from hotsplit.artifacts.predictor_file import FILE_NAME, LayerPredictor, Predictors
from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.convert.convert import convert
from hotsplit.convert.encode import encode
from hotsplit.convert.options import ConvertConfig
from hotsplit.convert.tokenizer import tokenizer_keys
from hotsplit.convert.vocabulary import vocabulary_keys
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import type_of
from hotsplit.model.weight_types import BY_NAME

OUTTYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")  # K-quants: test_gguf_source, test_encoder
EMBEDDING = "model.embed_tokens.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
# The checkpoint's name of each tensor of a layer; the keys are its names in the model file.
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down_t": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def relu(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("relu") / "tiny")


@pytest.fixture(scope="module")
def silu(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("silu") / "tiny", hidden_act="silu")


@pytest.fixture
def copy(relu, tmp_path) -> Path:
    """A copy of the checkpoint for a test to damage."""
    return Path(shutil.copytree(relu, tmp_path / "copy"))


def run(source: Path, output: Path, **options) -> ModelFile:
    """Converts and loads."""
    report = convert(ConvertConfig(source=source, output=output, **options))
    assert report.num_bytes == output.stat().st_size
    assert json.loads(json.dumps(dataclasses.asdict(report), default=str))["layout"]
    return ModelFile.load(output)


def refuse(source: Path, folder: Path, *words: str, **options) -> None:
    """Asserts that convert refuses in one line with these words and adds or removes no file."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(HotsplitError) as caught:
        convert(ConvertConfig(source=source, output=folder / "out.gguf", **options))
    message = str(caught.value)
    assert len(message) < 600, message  # a path, all families
    assert all(word in message for word in words), message
    assert sorted(folder.rglob("*")) == before


def edit_weights(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def expected_tensors(folder: Path, num_heads: int = 4, num_kv_heads: int = 2) -> dict:
    """f32 arrays computed by direct formulas; the keys are their names in a sparse model file."""
    source = {
        name: t.float().numpy() for name, t in load_file(folder / "model.safetensors").items()
    }
    wanted = {
        "token_embd.weight": source[EMBEDDING],
        "output_norm.weight": source["model.norm.weight"],
    }
    if "lm_head.weight" in source:
        wanted["output.weight"] = source["lm_head.weight"]
    for layer in range(3):
        for ours, theirs in PARTS.items():
            value = source[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                heads = num_heads if ours == "attn_q" else num_kv_heads
                size = len(value) // heads
                rows = [
                    h * size + half * size // 2 + pair
                    for h in range(heads)
                    for pair in range(size // 2)
                    for half in (0, 1)
                ]
                value = value[rows]
            wanted[f"blk.{layer}.{ours}.weight"] = value.T if ours == "ffn_down_t" else value
    return wanted


def values_of(model: ModelFile, name: str) -> np.ndarray:
    entry = model.tensors[name]
    return dequantize(entry.read(), type_of(entry.kind)).reshape(entry.shape)


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_every_tensor_equals_its_source(relu, tmp_path, outtype):
    model = run(relu, tmp_path / "m.gguf", outtype=outtype)
    wanted = expected_tensors(relu)
    assert model.tensors.keys() == wanted.keys()
    for name, want in wanted.items():
        kind = "f32" if want.ndim == 1 else outtype
        if outtype == "q4_0" and name == "output.weight":  # as llama.cpp's; q6_k where rows fit it
            kind = "q8_0"
        assert model.tensors[name].kind == kind
        read = model.tensors[name].read().tobytes()
        for array in (want, np.zeros_like(want), 0.5 * want, np.flip(want)):
            bytes_ = quantize(np.ascontiguousarray(array), type_of(kind))
            assert (read == bytes_.tobytes()) == (array is want) or (want == 1).all()
    assert (
        int(model.extra_keys["general.file_type"])
        == {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2}[outtype]
    )


def test_shards_change_no_byte_and_types_and_layouts_keep_the_model_id(silu, tmp_path):
    whole = run(silu, tmp_path / "a.gguf")
    shards = random_llama(tmp_path / "x" / "tiny", hidden_act="silu", is_sharded=True)
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    run(shards, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    for outtype in OUTTYPES:
        for layout in ("sparse", "stock"):
            options = {"outtype": outtype, "layout": layout, "force": True}
            assert run(silu, tmp_path / "m.gguf", **options).model_id == whole.model_id
    other = random_llama(tmp_path / "y" / "tiny", hidden_act="silu", seed=1)
    assert run(other, tmp_path / "c.gguf").model_id != whole.model_id


def test_bfloat16_is_kept_exactly_and_the_reported_bytes_add_up(tmp_path):
    folder = random_llama(tmp_path / "c", dtype=torch.bfloat16)
    reported = []
    config = ConvertConfig(source=folder, output=tmp_path / "m.gguf", outtype="bf16")
    convert(config, on_bytes=reported.append, on_total=lambda total: reported.append(-total))
    assert sum(reported) == 0 and len(reported) == 31
    model = ModelFile.load(config.output)
    for name, want in expected_tensors(folder).items():
        assert (values_of(model, name) == want).all()


def test_reads_of_a_tensor_share_a_mapping_that_ends_with_the_last(relu):
    def is_mapped():
        return str(relu / "model.safetensors") in Path("/proc/self/maps").read_text()

    checkpoint = Checkpoint.open(relu)
    assert not is_mapped()
    first, second = checkpoint.read(GATE), checkpoint.read(GATE)
    assert first.data_ptr() == second.data_ptr() and is_mapped()
    del first, second
    assert not is_mapped()


def test_tied_embeddings(copy, tmp_path):
    tied = random_llama(tmp_path / "tied", tie_word_embeddings=True)
    assert run(tied, tmp_path / "a.gguf").is_tied
    edit_config(copy, lambda c: c.pop("tie_word_embeddings"))
    assert not run(copy, tmp_path / "b.gguf").is_tied
    edit_weights(copy, lambda t: t.pop("lm_head.weight"))
    refuse(copy, tmp_path, "output.weight", "missing")  # a Llama config without the key is not tied
    edit_config(copy, lambda c: c.update(tie_word_embeddings=False))
    refuse(copy, tmp_path, "output.weight", "missing")
    edit_config(copy, lambda c: c.update(tie_word_embeddings=True))
    edit_weights(copy, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    assert run(copy, tmp_path / "d.gguf").is_tied
    edit_weights(copy, lambda t: t["lm_head.weight"][3].zero_())
    refuse(copy, tmp_path, "tie_word_embeddings", "lm_head.weight")


def test_rows_of_partial_blocks_become_f16_with_a_note(tmp_path):
    folder = random_llama(tmp_path / "c", hidden_act="silu", intermediate_size=176)
    for layout, number in (("sparse", 0), ("stock", 3)):
        output = tmp_path / f"{layout}.gguf"
        report = convert(ConvertConfig(source=folder, output=output, outtype="q8_0", layout=layout))
        kinds = {n: e.kind for n, e in ModelFile.load(output).tensors.items()}
        fallen = [n for n, kind in kinds.items() if kind == "f16"]
        assert fallen == [f"blk.{i}.ffn_down.weight" for i in range(number)]
        assert len(report.notes) == (number > 0)
        if number:
            assert (
                "3 of 23 matrices, 30% of the bytes, are f16" in report.notes[0]
                and fallen[0] in report.notes[0]
            )


def test_the_stock_layout_is_what_llama_cpp_loads(silu, relu, tmp_path):
    model = run(silu, tmp_path / "m.gguf", layout="stock")
    known = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.LLAMA]
    bases = {gguf.TENSOR_NAMES[t].format(bid=i) + ".weight" for t in known for i in range(3)}
    parts = set(PARTS) - {"ffn_down_t"} | {"ffn_down"}
    wanted = {f"blk.{i}.{part}.weight" for part in parts for i in range(3)}
    assert model.tensors.keys() == wanted | {
        "token_embd.weight",
        "output_norm.weight",
        "output.weight",
    }
    assert model.tensors.keys() <= bases
    down = load_file(silu / "model.safetensors")["model.layers.2.mlp.down_proj.weight"].numpy()
    assert (values_of(model, "blk.2.ffn_down.weight") == down.astype(np.float16)).all()
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert [k for k in fields if k.startswith("hotsplit")] == ["hotsplit.model_id"]
    refuse(relu, tmp_path, "SiLU", "relu", layout="stock")
    with pytest.raises(HotsplitError, match="cannot hold predictors"):
        ConvertConfig(source=silu, output=tmp_path / "x", layout="stock", predictors=tmp_path)
    (bare := tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(silu / name, bare)
    refuse(bare, tmp_path, "tokenizer.json", layout="stock")


@pytest.mark.parametrize("field", ["outtype", "layout"])
def test_unknown_options_are_refused(tmp_path, field):
    with pytest.raises(HotsplitError, match="unknown; known: "):
        ConvertConfig(source=tmp_path, output=tmp_path / "x", **{field: "q9"})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


YARN = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": length, **more}
    for length, more in (
        (64, {}),
        (32, {"attention_factor": 1.5}),
        (2048, {"beta_fast": 16.0, "beta_slow": 2.0}),
    )
]


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default"}, LLAMA3, {"rope_type": "linear", "factor": 4.0}, *YARN]
)
@pytest.mark.parametrize("is_old", [False, True])
def test_rotary_frequencies_equal_those_of_transformers(copy, tmp_path, rope, is_old):
    parameters = {**rope, "rope_theta": 500.0}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    embedding = LlamaRotaryEmbedding(config)
    want = embedding.inv_freq.double().numpy()
    edit_config(copy, lambda c: c.pop("rope_parameters"))
    old = {"rope_theta": 500.0, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    edit_config(copy, lambda c: c.update(old if is_old else {"rope_parameters": parameters}))
    model = run(copy, tmp_path / "m.gguf")
    scaling, theta = model.spec.rotary.scaling, model.spec.rotary.theta
    got = theta ** (-np.arange(8) / 8) / scaling.divisors(theta, 16)
    if rope is LLAMA3:
        got = got / values_of(model, "rope_freqs.weight")
    assert rel_error(got, want) < 1e-6
    assert ("rope_freqs.weight" in model.tensors) == (rope is LLAMA3)
    assert scaling.magnitude == pytest.approx(embedding.attention_scaling, rel=1e-6)


CONFIGS = {
    "architecture 'BertModel'": {"architectures": ["BertModel"]},
    "architecture None": {"architectures": None},
    "hidden_act 'tanh'": {"hidden_act": "tanh"},
    "attn_k.bias": {"attention_bias": True},
    "ffn_down.bias": {"mlp_bias": True},
    "quantization_config": {"quantization_config": {"quant_method": "gptq"}},
    "num_local_experts is 8, wanted 0 or 1: experts are not supported": {"num_local_experts": 8},
    "num_experts is 64": {"num_experts": 64},
    "n_routed_experts is '8'": {"n_routed_experts": "8"},
    "final_logit_softcapping is 30.0, wanted none: logits with a soft cap": {
        "final_logit_softcapping": 30.0
    },
    "embedding_multiplier is 12.0, wanted 1": {"embedding_multiplier": 12.0},
    "residual_multiplier is 0.22": {"residual_multiplier": 0.22},
    "attention_multiplier is 0.015": {"attention_multiplier": 0.015},
    "logits_scaling is 8": {"logits_scaling": 8},
    "scale_depth is 1.4": {"scale_depth": 1.4},
    "clip_qkv is 8": {"clip_qkv": 8},
    "alibi is True": {"alibi": True},
    "kv_lora_rank is 512, wanted none: attention over latent": {"kv_lora_rank": 512},
    "truncate is False": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
    "mscale is 'x', wanted a positive": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": "x"}
    },
    "wants above 1": {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "type 'dynamic'": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "rope_scaling.factor is missing": {"rope_scaling": {"type": "linear"}},
    "low_freq_factor": {"rope_parameters": {**LLAMA3, "low_freq_factor": 5.0}},
    "rope_parameters is 3": {"rope_parameters": 3},
    "hidden_act_param is None": {"hidden_act": "fatrelu"},
    "hidden_act_param is 'x'": {"hidden_act": "fatrelu", "hidden_act_param": "x"},
    "hidden_size is 'big'": {"hidden_size": "big"},
    "num_hidden_layers is 0": {"num_hidden_layers": 0},
    "num_attention_heads is 4.5": {"num_attention_heads": 4.5},
    "rms_norm_eps": {"rms_norm_eps": None},
    "num_attention_heads is 4, num_key_value_heads 3, head_dim 16": {"num_key_value_heads": 3},
    "tie_word_embeddings is 1": {"tie_word_embeddings": 1},
    "wanted [64, 161] by config.json": {"intermediate_size": 161},
    "no rule for tensor 'model.layers.2.": {"num_hidden_layers": 2},
    "no tensor for 'blk.3.": {"num_hidden_layers": 4},
    "is_causal is False": {"is_causal": False},
    "tie_word_embeddings is None": {"tie_word_embeddings": None},
    "attention_bias is None": {"attention_bias": None},
    "layer_types has 'chunked_attention'": {"layer_types": ["chunked_attention"] * 3},
    "but the largest dimension of a tensor is 320; config": {"head_dim": 10**9},
    "the width of the feed-forward layers is 1000": {"intermediate_size": 10**9},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": 1},
        {"num_experts": 0},
        {"num_local_experts": None},
        {"logits_scaling": 1.0},
        {"embedding_multiplier": 1},
        {"alibi": False},
        {"clip_qkv": None},
        {"model_type": None},
    ],
)
def test_a_key_that_changes_nothing_is_accepted(copy, tmp_path, changes):
    edit_config(copy, lambda config: config.update(changes))
    report = convert(ConvertConfig(source=copy, output=tmp_path / "m.gguf"))
    assert not any("config.json" in note for note in report.notes)


@pytest.mark.parametrize("said", ["llama9", "mistral", "", ["llama"], 3])
def test_another_model_type_is_noted(copy, tmp_path, said):
    """Its architecture is known, so it may be a renamed Llama, or compute something else."""
    edit_config(copy, lambda config: config.update(model_type=said))
    report = convert(ConvertConfig(source=copy, output=tmp_path / "m.gguf"))
    (note,) = [note for note in report.notes if "model_type" in note]
    assert note.startswith(f"{copy / 'config.json'}: model_type is {said!r}, wanted 'llama' beside")
    assert "converted as LlamaForCausalLM, which is wrong if it computes anything else" in note


@pytest.mark.parametrize("words", CONFIGS)
def test_a_config_that_would_be_computed_wrongly_is_refused(copy, tmp_path, words):
    edit_config(copy, lambda config: config.update(CONFIGS[words]))
    refuse(copy, tmp_path, words)


def one_value(value: float):
    return lambda tensors: tensors[GATE][3, 5].fill_(value)


def another(name: str, size: int):
    return lambda tensors: tensors.update({f"model.layers.1.self_attn.{name}": torch.ones(size)})


@pytest.mark.parametrize(
    "edit, words",
    [
        (one_value(np.nan), (GATE, "NaN")),
        (one_value(-np.inf), (GATE, "infinite")),
        (one_value(1e5), (GATE, "overflows f16", "bf16")),
        (another("q_proj.bias", 64), ("no rule", "q_proj.bias")),
        (lambda t: t.update({GATE: t[GATE].to(torch.int8)}), (GATE, "I8")),
        (lambda t: t.pop(GATE), ("blk.1.ffn_gate.weight", "missing")),
        (lambda t: t.update({GATE: t[GATE].T.contiguous()}), (GATE, "[64, 160]", "[160, 64]")),
    ],
)
def test_damaged_weights_are_refused(copy, tmp_path, edit, words):
    edit_weights(copy, edit)
    refuse(copy, tmp_path, *words)


def test_rotary_buffers_and_large_bf16_weights_are_accepted(copy, tmp_path):
    edit_weights(copy, another("rotary_emb.inv_freq", 8))
    run(copy, tmp_path / "a.gguf")
    edit_weights(copy, one_value(1e5))
    model = run(copy, tmp_path / "b.gguf", outtype="bf16")
    assert values_of(model, "blk.1.ffn_gate.weight").max() > 9e4


@pytest.mark.parametrize("kind", OUTTYPES)
def test_the_largest_magnitude_of_every_type(kind):
    """The last value below the limit stays finite; the limit overflows (f32 has no limit)."""
    limit = np.float32(min(BY_NAME[kind].overflows_at, np.finfo(np.float32).max))
    values = np.zeros((1, 32), np.float32)
    values[0, 7] = -np.nextafter(limit, np.float32(0))
    assert np.isfinite(dequantize(encode(values, kind, "x"), type_of(kind))).all()
    if kind == "f32":
        return
    values[0, 7] = -limit
    with pytest.raises(HotsplitError, match=f"overflows {kind}"):
        encode(values, kind, "x")
    with np.errstate(over="ignore", invalid="ignore"):
        assert not np.isfinite(dequantize(quantize(values, type_of(kind)), type_of(kind))).all()


def test_missing_and_truncated_files_are_refused(copy, tmp_path):
    refuse(tmp_path / "nothing", tmp_path, "no such folder")
    weights = (copy / "model.safetensors").read_bytes()
    for size in (0, 5, 200, len(weights) - 1):
        (copy / "model.safetensors").write_bytes(weights[:size])
        refuse(copy, tmp_path, "model.safetensors", "not a whole")
    (copy / "model.safetensors").unlink()
    refuse(copy, tmp_path, "none of model.safetensors")
    (copy / "pytorch_model.bin").touch()
    refuse(copy, tmp_path, "pytorch_model.bin", "not a whole")
    for text, words in (("{", "not JSON"), ("[1]", "list"), (b"\xff", "cannot be read")):
        (copy / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        refuse(copy, tmp_path, "config.json", words)
    (copy / "config.json").unlink()
    refuse(copy, tmp_path, "is a folder without config.json")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    refuse(tmp_path / "broken.gguf", tmp_path, "broken.gguf")
    refuse(tmp_path / "none.gguf", tmp_path, "no such file")


def test_an_output_that_exists_needs_force(relu, tmp_path):
    (tmp_path / "out.gguf").write_text("mine")
    refuse(relu, tmp_path, "exists already")
    assert (tmp_path / "out.gguf").read_text() == "mine"
    run(relu, tmp_path / "out.gguf", force=True)


def test_wrong_shards_are_refused(tmp_path):
    folder = random_llama(tmp_path / "c", is_sharded=True)
    index = "model.safetensors.index.json"
    original = (folder / index).read_text()
    shard = json.loads(original)["weight_map"][GATE]
    for edit, words in (
        (lambda i: i["weight_map"].pop(GATE), "in the shard but not in the index"),
        (lambda i: i["weight_map"].update(other=shard), "in the index but not in the shard"),
        (lambda i: i["weight_map"].update({GATE: "../x.safetensors"}), "no such file"),
        (lambda i: i.pop("weight_map"), "weight_map"),
    ):
        edit_config(folder, edit, index)
        refuse(folder, tmp_path, words)
        (folder / index).write_text(original)
    data = (folder / shard).read_bytes()
    (folder / shard).write_bytes(data[:-9])
    refuse(folder, tmp_path, shard, "not a whole")
    (folder / shard).unlink()
    refuse(folder, tmp_path, shard, "no such file")


# ------------------------------------------------------------------ predictors and thresholds


@pytest.mark.parametrize("outtype, kind", [("f32", "f32"), ("q8_0", "f16")])
@pytest.mark.parametrize("has_biases", [False, True])
def test_dejavu_predictors(relu, tmp_path, outtype, kind, has_biases):
    folder = random_dejavu(tmp_path / "p", has_biases=has_biases)
    (folder / "config.json").write_text('{"sparse_threshold": -0.5}')
    model = run(relu, tmp_path / "m.gguf", outtype=outtype, predictors=folder)
    assert model.predictor == PredictorInfo(
        kind="relu", rank_L=(24, 32, 40), threshold_L=(-0.5, -0.5, -0.5)
    )
    names = {
        "fc1.weight": "down.weight",
        "fc2.weight": "up.weight",
        "fc1.bias": "down.bias",
        "fc2.bias": "up.bias",
    }
    for layer in range(3):
        for theirs, value in torch.load(folder / f"model_{layer}.pt").items():
            entry = model.tensors[f"blk.{layer}.ffn_pred_{names[theirs]}"]
            assert entry.kind == (kind if value.ndim == 2 else "f32")
            dtype = np.float16 if entry.kind == "f16" else np.float32
            assert (entry.read() == value.numpy().astype(dtype)).all()


def change(folder: Path, layer: int, edit) -> None:
    """Replaces a layer's state dict by `edit(state)`."""
    torch.save(edit(torch.load(folder / f"model_{layer}.pt")), folder / f"model_{layer}.pt")


def filled(value: float):
    return lambda state: {**state, "fc2.weight": torch.full_like(state["fc2.weight"], value)}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda p: (p / "model_1.pt").unlink(), "model_1.pt is missing"),
        (lambda p: shutil.copy(p / "model_0.pt", p / "model_3.pt"), "model_3.pt is not expected"),
        (lambda p: shutil.copy(p / "model_0.pt", p / "model_01.pt"), "model_01.pt is not expected"),
        (lambda p: (p / "model_2.pt").rename(p / "model_10.pt"), "model_2.pt is missing"),
        (lambda p: [f.unlink() for f in p.glob("*.pt")], "has neither"),
        (lambda p: (p / FILE_NAME).touch(), "has both"),
        (lambda p: truncate(p / "model_1.pt"), "not a whole state dict"),
        (lambda p: torch.save([1, 2], p / "model_1.pt"), "holds a value of type list"),
        (lambda p: change(p, 1, lambda s: {**s, "fc3": torch.ones(1)}), "fc3"),
        (lambda p: change(p, 1, lambda s: {**s, "fc2.weight": 3}), "'fc2.weight' is a value"),
        (lambda p: change(p, 1, lambda s: {"fc1.weight": s["fc1.weight"]}), "wanted the tensors"),
        (lambda p: change(p, 1, lambda s: s["fc1.weight"].T), "holds a tensor"),
        (lambda p: change(p, 2, lambda s: {k: v.T for k, v in s.items()}), "is [64, 40]"),
        (lambda p: change(p, 2, filled(np.nan)), "NaN"),
        (lambda p: (p / "config.json").write_text('{"sparse_threshold": "x"}'), "sparse_threshold"),
    ],
)
def test_damaged_dejavu_predictors_are_refused(relu, tmp_path, damage, words):
    folder = random_dejavu(tmp_path / "p")
    damage(folder)
    refuse(relu, tmp_path, words, predictors=folder)


def test_predictors_beyond_f16_are_refused(relu, tmp_path):
    folder = random_dejavu(tmp_path / "p")
    change(folder, 2, filled(1e5))
    refuse(relu, tmp_path, "blk.2.ffn_pred_up.weight", "outtype f32", predictors=folder)
    refuse(relu, tmp_path, "no such folder", predictors=tmp_path / "none")
    run(relu, tmp_path / "m.gguf", outtype="f32", predictors=folder)


def our_predictors(model: ModelFile, folder: Path, **changes) -> Path:
    """Saves linear predictors of rank 8 in our own format."""
    random = np.random.default_rng(3)
    layers = [
        LayerPredictor.of(
            down_RD=random.standard_normal((8, 64)).astype(np.float32),
            up_FR=random.standard_normal((160, 8)).astype(np.float32),
            up_bias_F=random.standard_normal(160).astype(np.float32),
        )
        for _ in range(3)
    ]
    info = PredictorInfo(
        kind="linear", rank_L=(8,) * 3, threshold_L=(0.1, 0.2, 0.3), density_L=(0.25, 0.5, 0.75)
    )
    folder.mkdir()
    values = {"model_id": model.model_id, "info": info, "layers": tuple(layers), **changes}
    Predictors(**values).save(folder / FILE_NAME)
    return folder


@pytest.mark.parametrize("outtype", ["f32", "bf16", "q4_0"])
def test_adding_predictors_later_changes_nothing_else(relu, tmp_path, outtype):
    plain = run(relu, tmp_path / "plain.gguf", outtype=outtype)
    folder = our_predictors(plain, tmp_path / "p")
    direct = run(relu, tmp_path / "direct.gguf", outtype=outtype, predictors=folder)
    dejavu = run(plain.path, tmp_path / "d.gguf", predictors=random_dejavu(tmp_path / "dejavu"))
    later = run(dejavu.path, tmp_path / "later.gguf", predictors=folder, outtype=outtype)
    assert direct.path.read_bytes() == later.path.read_bytes()
    assert later.model_id == plain.model_id and later.extra_keys == plain.extra_keys
    for name, entry in plain.tensors.items():
        assert later.tensors[name].kind == entry.kind
        assert later.tensors[name].read().tobytes() == entry.read().tobytes()
    assert later.predictor is not None and later.predictor.kind == "linear"
    assert later.tensors["blk.2.ffn_pred_up.bias"].kind == "f32"


def test_predictors_that_do_not_fit_are_refused(relu, tmp_path):
    """The fuzz tests have more that is wrong in them."""
    model = run(relu, tmp_path / "m.gguf")
    other = our_predictors(model, tmp_path / "other", model_id="0" * 64)
    refuse(model.path, tmp_path, "made for model", predictors=other)
    wide = random_llama(tmp_path / "wide", intermediate_size=192)
    narrow = random_dejavu(tmp_path / "dejavu")
    refuse(wide, tmp_path, "is [160, 24], wanted [192, 24]", predictors=narrow)


# ------------------------------------------------------------------ tokenizer


def test_the_tokenizer_is_written_in_both_formats(relu, tmp_path):
    model = run(relu, tmp_path / "m.gguf")
    assert model.text("tokenizer.huggingface.json") == (relu / "tokenizer.json").read_text()
    keys, tokenizer = model.extra_keys, Tokenizer.from_file(str(relu / "tokenizer.json"))
    count = tokenizer.get_vocab_size()
    assert 257 < count < 320
    want = [tokenizer.id_to_token(i) or f"[PAD{i}]" for i in range(320)]
    assert keys["tokenizer.ggml.tokens"] == want
    assert keys["tokenizer.ggml.token_type"] == [3] + [1] * (count - 1) + [5] * (320 - count)
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert len(keys["tokenizer.ggml.merges"]) == count - 257
    assert (
        keys["tokenizer.ggml.eos_token_id"] == 0 and keys["tokenizer.ggml.add_bos_token"] is False
    )


def test_a_missing_tokenizer_is_noted(tmp_path):
    folder = random_llama(tmp_path / "c", has_tokenizer=False)
    report = convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
    assert "no tokenizer.json, which text needs" in report.notes[0]
    assert ModelFile.load(report.output).extra_keys["tokenizer.ggml.bos_token_id"] == 0


def byte_level(pattern: str | None, ignore_merges: bool, nfc: bool, prefix: bool = False) -> dict:
    """tokenizer.json of a byte-level BPE that splits at `pattern`; None: as GPT-2 does."""
    tokenizer = Tokenizer(token_models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)
    first = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    values = json.loads(tokenizer.to_str())
    values["model"]["ignore_merges"] = ignore_merges
    return values


@pytest.mark.parametrize(
    "arguments, name",
    [
        ((None, False, False), "gpt-2"),
        ((LLAMA3_SPLIT, True, False), "llama-bpe"),
        ((QWEN2_SPLIT, False, True), "qwen2"),
        ((QWEN35_SPLIT, False, True), "qwen35"),
        ((None, True, False), None),
        ((None, False, False, True), None),
        ((LLAMA3_SPLIT, False, False), "smaug-bpe"),
        ((LLAMA3_SPLIT, False, True), None),
        ((LLAMA3_SPLIT, True, True), None),
        ((LLAMA3_SPLIT[:-1], True, False), None),
    ],
)
def test_only_known_pre_tokenizers_are_named(silu, tmp_path, arguments, name):
    tokenizer = byte_level(*arguments)
    keys = vocabulary_keys(tokenizer, 4)
    assert (keys and keys["tokenizer.ggml.pre"]) == name
    if name is None:
        folder = Path(shutil.copytree(silu, tmp_path / "c"))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        refuse(folder, tmp_path, "llama.cpp has no tokenizer", layout="stock")
        report = convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf"))
        assert "llama.cpp has no tokenizer" in report.notes[0]
        assert "tokenizer.ggml.tokens" not in ModelFile.load(report.output).extra_keys


def test_a_refused_stock_layout_names_the_missing_tokenizer(tmp_path, monkeypatch):
    text = json.dumps(byte_level(None, True, False))
    made = "made from older files by transformers"
    monkeypatch.setattr("hotsplit.convert.tokenizer._tokenizer_text", lambda _: (text, [made]))
    with pytest.raises(HotsplitError) as error:
        tokenizer_keys(tmp_path, 4, "stock")
    assert "llama.cpp has no tokenizer" in str(error.value) and made not in str(error.value)
    notes = tokenizer_keys(tmp_path, 4, "sparse").notes
    assert "llama.cpp has no tokenizer" in notes[0] and notes[1] == made


def sentencepiece(is_metaspace: bool) -> Tokenizer:
    """A tokenizer like Llama 2's: bytes, words made by merges, control tokens, one added token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    merges = [("h", "e"), ("l", "o"), ("he", "l"), ("\u2581", "hel"), ("l", "lo"), ("\u2581", "w")]
    letters = ["\u2581", *"helowrd"]
    tokens += [a + b for a, b in merges] + letters
    tokenizer = Tokenizer(
        token_models.BPE(
            {t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    if is_metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("is_metaspace", [False, True])
def test_sentencepiece_scores_merge_as_the_source_does(is_metaspace):
    tokenizer = sentencepiece(is_metaspace)
    keys = vocabulary_keys(json.loads(tokenizer.to_str()), 280)
    assert keys is not None and keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert types[:4] == [2, 3, 3, 6] and types[258:260] == [6, 1]
    assert types[tokens.index("<tool>")] == 4 and types[-1] == 5 and tokens[-1] == "[PAD279]"
    for text in ("hello world", "helo", "lo", "wow \u00e9 hello", "w  w"):
        got = merge_by_score(text, tokens, keys["tokenizer.ggml.scores"])
        assert got == tokenizer.encode(text, add_special_tokens=False).ids
    flat = [0.0] * len(tokens)
    assert merge_by_score("helo", tokens, flat) != tokenizer.encode("helo").ids


@pytest.mark.parametrize("text", ["a", "[PAD9]", "\0", "c\0d"])
def test_tokens_that_would_crash_llama_cpp_are_not_written(text):
    tokenizer = byte_level(None, False, False)
    tokenizer["added_tokens"] = [{"id": 3, "content": text, "special": False}]
    assert (vocabulary_keys(tokenizer, 10) is None) and vocabulary_keys(tokenizer, 3)


def test_the_smollm_pre_tokenizer_is_known_only_as_published():
    values = json.loads(byte_level_tokenizer("smollm", 300).to_str())
    assert (vocabulary_keys(values, 300) or {})["tokenizer.ggml.pre"] == "smollm"
    values["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    assert vocabulary_keys(values, 300) is None


def noted(folder: Path, tokenizer: Tokenizer, layout: Layout = "stock") -> str:
    """The notes given when a tokenizer is written."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    return "\n".join(tokenizer_keys(folder, size, layout).notes)


def test_a_stock_file_notes_where_llama_cpp_tokenizes_differently(tmp_path):
    assert not noted(tmp_path / "a", byte_level_tokenizer("llama-bpe", 300))
    assert not noted(tmp_path / "b", sentencepiece_tokenizer(400))
    composing = byte_level_tokenizer("qwen2", 300)
    assert "does not compose letters" in noted(tmp_path / "c", composing)
    assert not noted(tmp_path / "d", composing, "sparse")
    stripping = byte_level_tokenizer("gpt-2", 300)
    stripping.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert "such as '<mask>'" in noted(tmp_path / "e", stripping)
    assert "space before text that begins with one" in noted(tmp_path / "f", sentencepiece(True))
    partial = noted(tmp_path / "g", sentencepiece_tokenizer(400, is_complete=False))
    assert "pairs of tokens that the merges do not join" in partial


def test_special_tokens_and_template(relu, tmp_path):
    folder = Path(shutil.copytree(relu, tmp_path / "c"))
    config = {"bos_token": "<|endoftext|>", "add_bos_token": True, "chat_template": "{{ x }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    keys = tokenizer_keys(folder, 300, "sparse").keys
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.chat_template"] == "{{ x }}"
    config["chat_template"] = [
        {"name": "default", "template": "d"},
        {"name": "rag", "template": "r"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    read = tokenizer_keys(folder, 260, "sparse")
    assert (
        read.keys["tokenizer.chat_template"] == "d"
        and len(read.keys["tokenizer.ggml.tokens"]) == 260
    )
    assert "are not in the model" in read.notes[0] and "rag" in read.notes[1]
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("j")
    assert tokenizer_keys(folder, 300, "sparse").keys["tokenizer.chat_template"] == "j"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"model": {"type": "BPE"}}',
        '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [3]}',
    ],
)
def test_a_broken_tokenizer_is_refused(copy, tmp_path, text):
    (copy / "tokenizer.json").write_text(text)
    refuse(copy, tmp_path, "tokenizer.json")


def test_model_id_covers_config_names_shapes_and_bytes(relu):
    checkpoint = Checkpoint.open(relu)
    samples = []
    for name, tensor in load_file(relu / "model.safetensors").items():
        data, middle = tensor.numpy().tobytes(), tensor.nbytes // 2
        pieces = (data[:4096], data[middle : middle + 4096], data[-4096:])
        samples.append((name, tuple(tensor.shape), b"".join(pieces)))
    config = json.loads((relu / "config.json").read_text())
    assert checkpoint.model_id() == compute_model_id(config, samples)

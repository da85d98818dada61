"""Models with gated delta nets: long texts against transformers, the layer against transformers' in
float64, checkpoints with parts that are left out, and files that are refused in one line."""

import json

import numpy as np
import pytest
import torch
from checkpoints import edit_config, random_model, save_tokenizer
from reference import rel_error
from safetensors.torch import load_file, save_file
from test_families import CASES
from transformers import AutoModelForCausalLM

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.artifacts.model_gguf import read_model_gguf
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry, write_gguf
from hotsplit.measure.evaluate.verify_conversion import verify

LONG = 300
DELTA_CASES = ["qwen3nextmoe", "qwen35", "qwen35moe"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function that returns the folder of a case's checkpoint, with states that last for many
    tokens; made on first use."""
    made = {}

    def get(case):
        if case not in made:
            folder = random_model(tmp_path_factory.mktemp(case) / "hf", CASES[case])
            weights = load_file(folder / "model.safetensors")
            for name, values in weights.items():
                if name.endswith("A_log"):
                    weights[name] = values - 3  # decays of about 0.97 a token
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
            edit_config(folder, lambda config: config.update(max_position_embeddings=LONG))
            save_tokenizer(folder, 320)
            made[case] = folder
        return made[case]

    return get


def converted(folder, output, **options):
    convert(ConvertConfig(source=folder, output=output, outtype="f32", **options))
    return output


@pytest.mark.parametrize("case", DELTA_CASES)
def test_a_long_text_has_the_logits_of_transformers(checkpoints, tmp_path, case):
    """At once, in passes of all sizes, and the last tokens one at a time."""
    ids = torch.randint(0, 320, (LONG,), generator=torch.Generator().manual_seed(1)).tolist()
    folder = checkpoints(case)
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    with torch.no_grad():
        want_TV = model(torch.tensor([ids])).logits[0]
    with Engine.load(converted(folder, tmp_path / "m.gguf"), mode="dense") as engine:
        with engine.sequence() as text:
            assert rel_error(text.extend(ids, "all"), want_TV) < 1e-5
        with engine.sequence() as text:
            bounds = [0, 1, 2, 4, 7, 64, 128, 255, 290]
            pieces = [
                text.extend(ids[start:stop], "all")
                for start, stop in zip(bounds, bounds[1:], strict=False)
            ]
            pieces += [text.extend([token], "all") for token in ids[290:]]
        got_TV = torch.cat(pieces)
        assert rel_error(got_TV, want_TV) < 1e-5
        assert rel_error(got_TV[-1], want_TV[-2]) > 0.1  # the measure sees another token


@pytest.mark.parametrize("case", ["qwen35", "qwen35moe"])
def test_the_text_model_beside_a_model_for_images(checkpoints, tmp_path, case):
    """The published form has a config in the config, other names, and further layers."""
    plain, folder = checkpoints(case), tmp_path / "hf"
    folder.mkdir()
    for file in plain.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(plain / "model.safetensors")
    weights = {n.replace("model.", "model.language_model."): v for n, v in weights.items()}
    weights |= {
        "model.visual.blocks.0.norm1.weight": torch.ones(3),
        "mtp.norm.weight": torch.ones(3),
    }
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((plain / "config.json").read_text())
    kind = text["model_type"].removesuffix("_text")
    name = text["architectures"][0].replace("CausalLM", "ConditionalGeneration")
    config = {"architectures": [name], "model_type": kind, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    report = convert(ConvertConfig(source=folder, output=tmp_path / "m.gguf", outtype="f32"))
    assert any(note.startswith("2 tensors left out") for note in report.notes), report.notes
    want = ModelFile.load(converted(plain, tmp_path / "plain.gguf"))
    got = ModelFile.load(tmp_path / "m.gguf")
    assert got.bare_spec == want.bare_spec
    assert got.tensors.keys() == want.tensors.keys()
    for tensor, entry in want.tensors.items():
        assert np.array_equal(got.tensors[tensor].read(), entry.read()), tensor
    (folder / "config.json").write_text(json.dumps(config | {"text_config": 3}))
    with pytest.raises(HotsplitError, match="text_config is 3, wanted the text model's config"):
        converted(folder, tmp_path / "n.gguf")


def rewritten(path, output, keys=None, tensors=None):
    """A copy of a GGUF with other keys and tensors; None removes one."""
    own_keys, own = read_model_gguf(path)
    merged = {k: v for k, v in {**own_keys, **(keys or {})}.items() if v is not None}
    merged = {k: v for k, v in merged.items() if not k.startswith("GGUF.")}
    entries = {n: e for n, e in {**own, **(tensors or {})}.items() if e is not None}
    architecture = str(merged.pop("general.architecture"))
    write_gguf(output, architecture, merged, entries)
    return output


def test_layers_that_predict_further_ahead_are_left_out_of_a_list(checkpoints, tmp_path):
    """They are the last layers of a file, and have attention."""
    path = converted(checkpoints("qwen35-stock"), tmp_path / "m.gguf", layout="stock")
    model, last = ModelFile.load(path), 4
    keys = {
        "qwen35.block_count": np.uint32(last + 1),
        "qwen35.nextn_predict_layers": np.uint32(1),
        "qwen35.attention.recurrent_layers": [
            *(layer.recurrent is not None for layer in model.spec.layers),
            False,
        ],
    }
    own = {f"blk.{last}.nextn.enorm.weight": array_entry(np.ones(64, np.float32), "f32")}
    got = ModelFile.load(rewritten(path, tmp_path / "mtp.gguf", keys, own))
    assert got.bare_spec == model.bare_spec and got.num_skipped == 1
    assert got.tensors.keys() == model.tensors.keys()


# What convert_hf_to_gguf.py of llama.cpp of July 2026 makes of these checkpoints with a layer
# `mtp`.
NORMS = {"attn_norm.weight": (64,), "post_attention_norm.weight": (64,)}
EXPERTS = NORMS | {
    "ffn_down_exps.weight": (7, 64, 37),
    "ffn_gate_exps.weight": (7, 37, 64),
    "ffn_up_exps.weight": (7, 37, 64),
    "ffn_gate_inp.weight": (7, 64),
    "ffn_down_shexp.weight": (64, 43),
    "ffn_gate_shexp.weight": (43, 64),
    "ffn_up_shexp.weight": (43, 64),
    "ffn_gate_inp_shexp.weight": (1, 64),
}
STATES = EXPERTS | {
    "ssm_a": (6,),
    "ssm_conv1d.weight": (160, 4),
    "ssm_dt.bias": (6,),
    "attn_qkv.weight": (160, 64),
    "attn_gate.weight": (96, 64),
    "ssm_norm.weight": (16,),
    "ssm_out.weight": (64, 96),
}
PLAIN = EXPERTS | {
    "attn_k_norm.weight": (24,),
    "attn_k.weight": (48, 64),
    "attn_output.weight": (64, 96),
    "attn_q_norm.weight": (24,),
    "attn_q.weight": (192, 64),
    "attn_v.weight": (48, 64),
}
AHEAD = PLAIN | {
    "nextn.eh_proj.weight": (64, 128),
    "nextn.shared_head_norm.weight": (64,),
    "nextn.enorm.weight": (64,),
    "nextn.hnorm.weight": (64,),
}
OF_STEPS = {
    "qwen3next": {"ssm_ba.weight": (12, 64)},
    "qwen35moe": {"ssm_alpha.weight": (6, 64), "ssm_beta.weight": (6, 64)},
}
COUNTS = {
    "block_count": 5,
    "context_length": LONG,
    "embedding_length": 64,
    "feed_forward_length": 160,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "expert_count": 7,
    "expert_used_count": 3,
    "attention.key_length": 24,
    "attention.value_length": 24,
    "expert_feed_forward_length": 37,
    "expert_shared_feed_forward_length": 43,
    "nextn_predict_layers": 1,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 96,
    "full_attention_interval": 4,
    "rope.dimension_count": 6,
}
FLOATS = {"rope.freq_base": 1e4, "attention.layer_norm_rms_epsilon": 1e-3}


def of_llama_cpp(path, name, changes):
    """Keys and tensors, as llama.cpp's converter writes them, of a stock file made here."""
    _, own = read_model_gguf(path)
    keys = {f"{name}.{key}": np.uint32(value) for key, value in COUNTS.items()}
    keys |= {f"{name}.{key}": np.float32(value) for key, value in FLOATS.items()}
    if name == "qwen35moe":
        keys[f"{name}.rope.dimension_sections"] = [11, 11, 10, 0]
    states = STATES | OF_STEPS[name]
    tensors = {n: e for n, e in own.items() if not n.startswith("blk.")}
    for layer, shapes in enumerate([states, states, states, PLAIN, AHEAD]):
        for tensor, shape in shapes.items():
            source = own.get(f"blk.{min(layer, 3)}.{tensor}")
            values = np.ones(shape, np.float32) if source is None else source.read()
            tensors[f"blk.{layer}.{tensor}"] = array_entry(values.reshape(shape), "f32")
    tensors = {n: e for n, e in (tensors | changes).items() if e is not None}
    return keys, tensors


def older(folder):
    """Queries, keys, values and gates of each key head in turn, as in the checkpoint: what
    llama.cpp's converter wrote for Qwen3-Next before it had two matrices."""
    weights, changes = load_file(folder / "model.safetensors"), {}
    for layer in range(3):
        joined = weights[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"].numpy()
        changes |= {f"blk.{layer}.{name}.weight": None for name in ("attn_qkv", "attn_gate")}
        changes[f"blk.{layer}.ssm_in.weight"] = array_entry(joined, "f32")
    return changes


@pytest.mark.parametrize(
    "case, is_older",
    [("qwen35moe", False), ("qwen3nextmoe-stock", False), ("qwen3nextmoe-stock", True)],
)
def test_a_file_of_llama_cpps_converter_runs_and_converts(checkpoints, tmp_path, case, is_older):
    stock = converted(checkpoints(case), tmp_path / "m.gguf", layout="stock")
    name, ids = ModelFile.load(stock).architecture, list(range(40))
    changes = older(checkpoints(case)) if is_older else {}
    keys, tensors = of_llama_cpp(stock, name, changes)
    write_gguf(source := tmp_path / "theirs.gguf", name, keys, tensors)
    with Engine.load(stock, mode="dense") as engine:
        want_TV = engine.logits(ids)
    with Engine.load(source, mode="dense", draft_block=True) as engine:
        assert torch.equal(engine.logits(ids), want_TV) and engine.has_draft_block
    config = ConvertConfig(source=source, output=tmp_path / "sparse.gguf")
    report = convert(config, verify=lambda written: [verify(written).line])
    assert "logits equal the source's" in report.verified
    with Engine.load(config.output, mode="dense", draft_block=True) as engine:
        assert engine.has_draft_block
        assert rel_error(engine.logits(ids), want_TV) < 1e-5


def test_what_is_no_whole_file_of_llama_cpps_converter_is_refused(checkpoints, tmp_path):
    folder = checkpoints("qwen3nextmoe-stock")
    stock = converted(folder, tmp_path / "m.gguf", layout="stock")
    wrong = older(folder)
    wrong["blk.1.ssm_in.weight"] = array_entry(np.ones((255, 64), np.float32), "f32")
    keys, tensors = of_llama_cpp(stock, "qwen3next", wrong)
    write_gguf(tmp_path / "a.gguf", "qwen3next", keys, tensors)
    with pytest.raises(HotsplitError, match="unknown tensor 'blk.1.ssm_in.weight'"):
        ModelFile.load(tmp_path / "a.gguf")
    ahead = {n: e for n, e in tensors.items() if n.startswith(("blk.4.", "token", "output"))}
    write_gguf(tmp_path / "b.gguf", "qwen3next", keys, ahead)
    with pytest.raises(HotsplitError, match="has only the layers that predict tokens further"):
        ModelFile.load(tmp_path / "b.gguf")


WRONG = {
    "no tensor 'blk.1.ssm_norm.weight'": ({}, {"blk.1.ssm_norm.weight": None}),
    "ssm.inner_size is 121, which does not divide among 6 heads": (
        {"qwen35.ssm.inner_size": np.uint32(121)},
        {},
    ),
    "6 value heads of delta nets do not divide among 4": (
        {"qwen35.ssm.group_count": np.uint32(4)},
        {},
    ),
    "a convolution of 99 taps": ({"qwen35.ssm.conv_kernel": np.uint32(99)}, {}),
    r"ssm_conv1d.weight is f32 \[168, 3\], wanted \[168, 4\]": (
        {"qwen35.ssm.conv_kernel": np.uint32(4)},
        {},
    ),
    "none of 5 layers has attention": ({"qwen35.full_attention_interval": np.uint32(9)}, {}),
    "'qwen35.ssm.state_size' is missing, wanted a number": ({"qwen35.ssm.state_size": None}, {}),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_file_is_refused_in_one_line(checkpoints, tmp_path, words):
    path = converted(checkpoints("qwen35"), tmp_path / "m.gguf")
    with pytest.raises(HotsplitError, match=words):
        ModelFile.load(rewritten(path, tmp_path / "wrong.gguf", *WRONG[words]))

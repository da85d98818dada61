"""Packed checkpoints: each layout against its formula in float64 (packed_layouts), transformers'
own dequantisation and logits, and the libraries that publish them where these are installed."""

import json
import shutil

import numpy as np
import pytest
import torch
from checkpoints import TINY, edit_config, random_llama, random_model, save_tokenizer
from gguf.quants import dequantize
from packed_layouts import GROUP, LAYOUTS, Layout, gptq, words
from reference import rel_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.metal_quantization import _affine_dequantize_tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.checkpoint import Checkpoint
from hotsplit.convert.checkpoint_summary import summarise_checkpoint
from hotsplit.convert.convert import convert, draft_of
from hotsplit.convert.options import ConvertConfig
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import type_of, values_of
from hotsplit.measure.evaluate.verify_conversion import _in_f32, verify
from hotsplit.run.source import look_at
from hotsplit.runtime.engine import Engine

FILE, UP = "model.safetensors", "model.layers.0.mlp.up_proj"
IDS = [3, 17, 200, 41, 9, 88, 150, 7, 300, 12]
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder, half = tmp_path_factory.mktemp("dense"), torch.float16
    sizes = {"num_hidden_layers": 2, "intermediate_size": 192}
    return random_llama(folder, hidden_act="silu", dtype=half, **sizes)


def packed_folder(dense, folder, layout: Layout, *, key="quantization_config"):
    """The checkpoint with its linear layers packed, and one with the values of the formula;
    returns the first, and the values by name. A layer's `v_proj` is left as it is."""
    chance = np.random.default_rng(0)
    shutil.copytree(dense, folder / "packed")
    shutil.copytree(dense, folder / "values")
    weights = load_file(dense / "model.safetensors")
    packed, values = dict(weights), dict(weights)
    for name in [n for n in weights if n.endswith("_proj.weight") and "1.self_attn.v" not in n]:
        tensors, want = layout.pack(chance, *weights[name].shape)
        del packed[name]
        stem = name.removesuffix(".weight")
        packed |= {f"{stem}.{suffix}": tensor for suffix, tensor in tensors.items()}
        values[name] = torch.from_numpy(want).float().contiguous()
    save_file(packed, folder / "packed/model.safetensors", {"format": "pt"})
    save_file(values, folder / "values/model.safetensors", {"format": "pt"})
    edit_config(folder / "packed", lambda config: config.update({key: layout.config}))
    return folder / "packed", values


def as_written(name, values):
    """Values by a checkpoint's name as a model file of a llama has them: rows of queries and keys
    in pairs that rotate together."""
    if not any(each in name for each in ("q_proj", "k_proj")):
        return values
    halves = values.reshape(-1, 2, TINY["hidden_size"] // TINY["num_attention_heads"] // 2, 64)
    return halves.swapaxes(1, 2).reshape(values.shape)


def converted(folder, output, **options):
    return convert(ConvertConfig(source=folder, output=output, **options))


def matrices(path):
    """(layer, name in the checkpoint, entry) of the packed matrices of a file."""
    tensors = ModelFile.load(path).tensors
    for layer in range(2):
        for ours, theirs in NAMES.items():
            if (layer, ours) != (1, "attn_v"):
                down = f"blk.{layer}.{ours}_t.weight"
                name = down if down in tensors else f"blk.{layer}.{ours}.weight"
                yield f"model.layers.{layer}.{theirs}.weight", name, tensors[name]


def logits_of(path):
    model = _in_f32(ModelFile.load(path))
    with Engine.of(model, mode="dense", device="cpu", context_length=16) as engine:
        return engine.logits(IDS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_values_of_its_formula(dense, tmp_path, name):
    """Without an outtype each matrix is in the type that keeps it, and the logits are those of
    transformers with the formula's values; in f32, transposed ones too, all values are equal."""
    layout = LAYOUTS[name]
    key = "quantization" if name.startswith("MLX") else "quantization_config"
    folder, values = packed_folder(dense, tmp_path, layout, key=key)
    report = converted(folder, tmp_path / "kept.gguf", layout="stock")
    (note,) = [note for note in report.notes if note.startswith("packed weights")]
    kept = "unpacked to" if layout.kind in ("f16", "bf16") else "as they are, in"
    assert f"13 tensors {kept} {layout.kind}" in note
    rounded = [note for note in report.notes if "packed tensors, such as" in note]
    assert bool(rounded) == (not layout.is_exact and layout.kind == "bf16")
    for source, ours, entry in matrices(tmp_path / "kept.gguf"):
        assert entry.in_file.kind == layout.kind, ours
        want = as_written(source, values[source].numpy())
        got = values_of(entry.read(), entry.kind)
        if layout.is_exact:
            assert np.array_equal(got, want), ours
        else:
            np.testing.assert_allclose(got, want, rtol=2**-8 if layout.kind == "bf16" else 2**-11)
    converted(folder, tmp_path / "f32.gguf", outtype="f32")
    for source, ours, entry in matrices(tmp_path / "f32.gguf"):
        want = as_written(source, values[source].numpy())
        assert np.array_equal(entry.read(), want.T if "down_t" in ours else want), ours
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "values", dtype=torch.float32)
    with torch.no_grad():
        want_TV = model(torch.tensor([IDS])).logits[0]
    assert rel_error(logits_of(tmp_path / "f32.gguf"), want_TV) < 1e-5
    if layout.is_exact:
        assert rel_error(logits_of(tmp_path / "kept.gguf"), want_TV) < 1e-5
    with Engine.load(tmp_path / "kept.gguf", mode="dense", device="cpu") as engine:  # by kernels
        assert rel_error(engine.logits(IDS), want_TV) < 5e-3


@pytest.mark.parametrize("name", ["GPTQ 4, zero points", "AWQ", "int8, a scale a row", "MLX 4"])
def test_the_type_asked_for_is_the_bits_themselves_or_rounded(dense, tmp_path, name):
    """Asked for, the type that keeps a matrix keeps its bits; any other rounds the values, and an
    override of one name counts for it alone."""
    layout = LAYOUTS[name]
    folder, values = packed_folder(dense, tmp_path, layout)
    converted(
        folder,
        tmp_path / "own.gguf",
        layout="stock",
        outtype="q8_0",
        tensor_types=(f"ffn_up={layout.kind}",),
    )
    for source, ours, entry in matrices(tmp_path / "own.gguf"):
        want, is_own = as_written(source, values[source].numpy()), "ffn_up" in ours
        assert entry.kind == (layout.kind if is_own else "q8_0")
        got = dequantize(entry.read(), type_of(entry.kind))
        if is_own or layout.kind == "q8_0":
            assert np.array_equal(got, want), ours
        else:
            assert 0 < np.abs(got - want).max() <= np.abs(want).max() / 127


SIZED = ("GPTQ 4, zero points", "fp8, blocks", "int4", "MLX 4", "mxfp4")


def test_sizes_are_known_from_headers_alone(dense, tmp_path):
    """As of a model on the hub: the file is a hole behind its header."""
    for name in (*SIZED, "nvfp4, ModelOpt", "nvfp4, compressed-tensors"):
        folder, _ = packed_folder(dense, tmp_path / name, LAYOUTS[name])
        want = draft_of(ConvertConfig(source=folder, output=tmp_path / "m", layout="stock")).model
        whole = (folder / "model.safetensors").read_bytes()
        length = 8 + int.from_bytes(whole[:8], "little")
        (folder / "model.safetensors").write_bytes(whole[:length] + bytes(len(whole) - length))
        got = draft_of(ConvertConfig(source=folder, output=tmp_path / "m", layout="stock")).model
        sizes = [{n: (e.kind, e.shape) for n, e in m.tensors.items()} for m in (got, want)]
        assert sizes[0] == sizes[1]
        summary = summarise_checkpoint(folder)
        assert summary.refusal is None and any("packed weights" in each for each in summary.notes)
        source = look_at(folder, None, tmp_path / "unused.gguf")
        assert source.own_type == LAYOUTS[name].kind


def test_values_are_those_of_transformers(dense, tmp_path):
    """What it unpacks itself; of FP8 in blocks whole ones, since it divides to find them."""
    folder, layer = tmp_path / "packed", "model.layers.0"
    up, gate, down = (f"{layer}.mlp.{each}_proj" for each in ("up", "gate", "down"))
    q, o = f"{layer}.self_attn.q_proj", f"{layer}.self_attn.o_proj"
    chance = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.rand(shape, generator=chance) / 100

    def codes(num_rows, width):
        return (torch.randn(num_rows, width, generator=chance) * 99).to(torch.float8_e4m3fn)

    def put(packing, tensors, want):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(dense, folder)
        weights = load_file(folder / "model.safetensors")
        for name in [n for n in weights if n in want]:
            del weights[name]
        save_file(weights | tensors, folder / "model.safetensors", {"format": "pt"})
        edit_config(folder, lambda c: c.update(quantization_config=packing))
        got = Checkpoint.open(folder)
        for name, values in want.items():
            assert torch.equal(got.read(name), values), name

    unpack = Fp8Dequantize(None)._dequantize_one
    packing = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    blocks, exponents = numbers(6, 2), (numbers(192, 2) * 1000 + 118).to(torch.uint8)
    tensors = {f"{up}.weight": codes(192, 64), f"{up}.weight_scale_inv": blocks}
    tensors |= {f"{gate}.weight": codes(192, 64), f"{gate}.weight_scale_inv": exponents}
    tensors |= {f"{down}.weight": codes(64, 192), f"{down}.weight_scale_inv": numbers(64, 1)}
    want = {
        f"{each}.weight": unpack(
            tensors[f"{each}.weight"], tensors[f"{each}.weight_scale_inv"], torch.float32
        )
        for each in (up, gate, down)
    }
    put(packing, tensors, want)
    words = torch.randint(0, 1 << 31, (64, 8), generator=chance).to(torch.uint32)
    affine = words, numbers(64, 2), numbers(64, 2)
    tensors = dict(zip((f"{q}.weight", f"{q}.scales", f"{q}.biases"), affine, strict=True))
    want = {f"{q}.weight": _affine_dequantize_tensor(*affine, 32, 4)}
    put({"group_size": 32, "bits": 4}, tensors, want)
    blocks = torch.randint(0, 256, (64, 2, 16), generator=chance, dtype=torch.uint8)
    exponents = exponents[:64]
    tensors = {f"{o}.weight_packed": blocks.flatten(1), f"{o}.weight_scale": exponents}
    # Transposed by transformers, of one expert.
    whole = convert_moe_packed_tensors(blocks[None], exponents[None], dtype=torch.float32)[0].T
    put({"quant_method": "compressed-tensors"}, tensors, {f"{o}.weight": whole})


def one_matrix(folder, packing, parts, key="quantization_config"):
    """The packed matrix `a` of a checkpoint that has nothing else."""
    save_file({f"a.{name}": part.contiguous() for name, part in parts.items()}, folder / FILE)
    (folder / "config.json").write_text(json.dumps({key: packing}))
    return Checkpoint.open(folder).read("a.weight")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_of_the_whole_matrix_has_any_shape_of_one_number(tmp_path, shape):
    packing = {"quant_method": "fp8", "weight_block_size": None}
    codes = torch.randn(192, 256).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale_inv": torch.full(shape, 0.375)}
    assert torch.equal(one_matrix(tmp_path, packing, parts), 0.375 * codes.float())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_values_are_those_of_mlx(tmp_path, bits):
    mx = pytest.importorskip("mlx.core")
    values = mx.array(np.random.default_rng(0).normal(size=(32, 128)).astype(np.float16))
    parts = mx.quantize(values, group_size=64, bits=bits)
    names = ("weight", "scales", "biases")
    stored = {name: torch.from_numpy(np.array(x)) for name, x in zip(names, parts, strict=True)}
    got = one_matrix(tmp_path, {"group_size": 64, "bits": bits}, stored, "quantization")
    in_f32 = [parts[0], *(part.astype(mx.float32) for part in parts[1:])]
    want = np.array(mx.dequantize(*in_f32, group_size=64, bits=bits))
    assert np.array_equal(got.numpy(), want)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_values_are_those_of_compressed_tensors(tmp_path, bits, symmetric):
    library = pytest.importorskip("compressed_tensors")
    args = library.quantization.QuantizationArgs(
        num_bits=bits, type="int", strategy="group", group_size=32, symmetric=symmetric
    )
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = library.compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    groups = weight.reshape(64, -1, 32)
    scale, zero = library.quantization.utils.calculate_qparams(
        groups.amin(-1), groups.amax(-1), args
    )
    parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    packed = compressor.compress(parts, scheme)
    packing = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    packing |= {"config_groups": {"group_0": json.loads(scheme.model_dump_json())}}
    got = one_matrix(tmp_path, packing, packed)
    assert torch.equal(got, compressor.decompress(packed, scheme)["weight"])


def test_experts_of_mlx_are_the_experts(tmp_path):
    """MLX has all experts of a layer in one tensor under another name."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    more = {"norm_topk_prob": True, "head_dim": 16, "intermediate_size": 32}
    config = Qwen3MoeConfig(**{**TINY, "num_hidden_layers": 1, **sizes, **more})
    folder = random_model(tmp_path / "hf", config)
    save_tokenizer(folder, TINY["vocab_size"])
    weights, chance, want = load_file(folder / FILE), np.random.default_rng(0), {}
    layer = "model.layers.0.mlp"
    for part, ours in (("gate", "gate"), ("up", "up"), ("down", "down")):
        names = [f"{layer}.experts.{expert}.{part}_proj.weight" for expert in range(4)]
        made = [LAYOUTS["MLX 4"].pack(chance, *weights.pop(name).shape) for name in names]
        for suffix in ("weight", "scales", "biases"):
            joined = torch.stack([tensors[suffix] for tensors, _ in made])
            weights[f"{layer}.switch_mlp.{part}_proj.{suffix}"] = joined
        want[f"blk.0.ffn_{ours}_exps.weight"] = np.stack([values for _, values in made])
    save_file(weights, folder / FILE, {"format": "pt"})
    edit_config(folder, lambda c: c.update(quantization=LAYOUTS["MLX 4"].config))
    converted(folder, tmp_path / "m.gguf", layout="stock")
    tensors = ModelFile.load(tmp_path / "m.gguf").tensors
    for name, values in want.items():
        assert tensors[name].kind == "q4_1"
        got = dequantize(tensors[name].read(), type_of("q4_1"))
        assert np.array_equal(got, values.astype(np.float32)), name


def test_an_expert_may_be_left_as_it_is(tmp_path):
    """Then all of its tensor are unpacked."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    more = {"norm_topk_prob": True, "head_dim": 16, "intermediate_size": 32}
    config = Qwen3MoeConfig(**{**TINY, "num_hidden_layers": 1, **sizes, **more})
    folder = random_model(tmp_path / "hf", config)
    save_tokenizer(folder, TINY["vocab_size"])
    weights, chance = load_file(folder / FILE), np.random.default_rng(0)
    for name in [n for n in weights if "experts" in n and "experts.2.up" not in n]:
        parts, _ = LAYOUTS["GPTQ 4"].pack(chance, *weights.pop(name).shape)
        weights |= {f"{name.removesuffix('.weight')}.{n}": part for n, part in parts.items()}
    save_file(weights, folder / FILE, {"format": "pt"})
    edit_config(folder, lambda c: c.update(quantization_config=LAYOUTS["GPTQ 4"].config))
    converted(folder, tmp_path / "m.gguf", layout="stock")
    tensors = ModelFile.load(tmp_path / "m.gguf").tensors
    kinds = {part: tensors[f"blk.0.ffn_{part}_exps.weight"].kind for part in ("gate", "up", "down")}
    assert kinds == {"gate": "q4_0", "up": "f16", "down": "q4_0"}


def test_values_are_verified_where_transformers_cannot_run(dense, tmp_path):
    folder, _ = packed_folder(dense, tmp_path, LAYOUTS["GPTQ 4"])
    said: list[str] = []
    config = ConvertConfig(source=folder, output=tmp_path / "m.gguf")
    convert(config, verify=lambda written: said.extend(verify(written).lines) or said)
    assert said[0].startswith("values verified, logits not: transformers cannot run")


def test_a_mixture_of_packings_is_told_by_the_tensors(dense, tmp_path):
    """Groups of compressed-tensors with targets of their own, and a module that none names."""
    layers = {"q_proj": LAYOUTS["fp8, compressed-tensors"], "gate_proj": LAYOUTS["int4"]}
    layers |= {"up_proj": LAYOUTS["int8, a scale a row"]}
    folder = shutil.copytree(dense, tmp_path / "packed")
    weights, chance = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    groups, want = {}, {}
    for number, (part, layout) in enumerate(layers.items()):
        own = layout.config["config_groups"]["group_0"]["weights"]
        groups[f"group_{number}"] = {"targets": [f"re:.*{part}$"], "weights": own}
        for name in [n for n in weights if n.endswith(f"{part}.weight")]:
            tensors, want[name] = layout.pack(chance, *weights.pop(name).shape)
            stem = name.removesuffix(".weight")
            weights |= {f"{stem}.{suffix}": tensor for suffix, tensor in tensors.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    packing = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    edit_config(folder, lambda c: c.update(quantization_config=packing | {"config_groups": groups}))
    report = converted(folder, tmp_path / "m.gguf", layout="stock")
    assert len([note for note in report.notes if note.startswith("packed weights")]) == 3
    kinds = {"q_proj": "bf16", "gate_proj": "q4_0", "up_proj": "q8_0"}
    for source, _, entry in matrices(tmp_path / "m.gguf"):
        assert entry.kind == kinds.get(source.split(".")[-2], "f16"), source
        if source in want and entry.kind != "bf16":
            got = dequantize(entry.read(), type_of(entry.kind))
            assert np.array_equal(got, as_written(source, want[source].astype(np.float32)))


@pytest.mark.parametrize("has_index", [True, False])
def test_a_module_may_have_bits_of_its_own(dense, tmp_path, has_index):
    """GPTQModel's `dynamic` and AutoRound's `extra_config` give some modules other bits."""
    order = "" if has_index else "none"
    layout = Layout(LAYOUTS["GPTQ 4"].config, gptq(4, is_symmetric=True, order=order), "q4_0")
    folder, values = packed_folder(dense, tmp_path, layout)
    weights, name = load_file(folder / FILE), f"{UP}.weight"
    parts, want = gptq(8, is_symmetric=True, order=order)(np.random.default_rng(1), 192, 64)
    save_file(weights | {f"{UP}.{n}": part for n, part in parts.items()}, folder / FILE)
    converted(folder, tmp_path / "m.gguf", layout="stock")
    for source, ours, entry in matrices(tmp_path / "m.gguf"):
        assert entry.kind == ("q8_0" if source == name else "q4_0"), ours
        if source == name:
            assert np.array_equal(dequantize(entry.read(), type_of("q8_0")), want.astype("f"))


def test_zeros_beside_a_packed_layer_are_no_bias(dense, tmp_path):
    """AutoGPTQ saves biases of layers that have none; others are refused."""
    folder, _ = packed_folder(dense, tmp_path, LAYOUTS["GPTQ 4"])
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.bias"] = torch.zeros(192, dtype=torch.float16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    converted(folder, tmp_path / "m.gguf")
    weights["model.layers.0.mlp.up_proj.bias"][7] = 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(HotsplitError, match=r"no rule for tensor 'model.layers.0.mlp.up_proj.bias"):
        converted(folder, tmp_path / "m2.gguf")


def test_zero_points_of_floats_are_zeros(dense, tmp_path):
    folder, values = packed_folder(dense, tmp_path, LAYOUTS["fp8, compressed-tensors"])
    weights = load_file(folder / FILE)
    weights[f"{UP}.weight_zero_point"] = torch.zeros(192, 1).to(torch.float8_e4m3fn)
    save_file(weights, folder / FILE)
    assert torch.equal(Checkpoint.open(folder).read(f"{UP}.weight"), values[f"{UP}.weight"])
    weights[f"{UP}.weight_zero_point"] = torch.ones(192, 1).to(torch.float8_e4m3fn)
    save_file(weights, folder / FILE)
    with pytest.raises(HotsplitError, match="weight_zero_point' is not all 0"):
        Checkpoint.open(folder)


def without(name):
    return lambda weights, config: weights.pop(f"{UP}.{name}")


def with_tensor(name, make):
    return lambda weights, config: weights.update({f"{UP}.{name}": make(weights)})


def with_packing(**values):
    return lambda weights, config: config["quantization_config"].update(values)


WRONG = {
    "no scale": ("GPTQ 4", without("scales"), "no tensor 'model.layers.0.mlp.up_proj.scales'"),
    "no fp8 scale": ("fp8, blocks", without("weight_scale_inv"), "no tensor .*weight_scale_inv"),
    "no zeros of AWQ": ("AWQ", without("qzeros"), "no tensor .*up_proj.qzeros', without which"),
    "no zeros of int4": (
        "int4, zero points",
        without("weight_zero_point"),
        "no tensor .*up_proj.weight_zero_point', without which",
    ),
    "no zeros of bytes": (
        "W8A8",
        lambda weights, config: config["quantization_config"]["config_groups"]["group_0"][
            "weights"
        ].update(symmetric=False),
        "no tensor .*weight_zero_point', without which",
    ),
    "no factor": ("nvfp4, ModelOpt", without("weight_scale_2"), "is U8, wanted one of"),
    "no biases": ("MLX 4", without("biases"), "no tensor 'model.layers.0.mlp.up_proj.biases'"),
    "no global scale": (
        "nvfp4, compressed-tensors",
        without("weight_global_scale"),
        "weight_scale', a part of packed weights, is F8_E4M3",
    ),
    "no exponents": (
        "mxfp4",
        with_tensor("weight_scale", lambda w: torch.ones(192, 2)),
        "weight_scale', a part of packed weights, is F32 .* wanted U8 or",
    ),
    "shape": (
        "GPTQ 4",
        with_tensor("scales", lambda w: w[f"{UP}.scales"][:, :-1].contiguous()),
        r"scales' is \[2, 191\], wanted \[2, 192\] beside",
    ),
    "shape of zeros": (
        "int4, zero points",
        with_tensor("weight_zero_point", lambda w: w[f"{UP}.weight_zero_point"][:-1].clone()),
        r"weight_zero_point' is \[23, 2\], wanted \[24, 2\]",
    ),
    "shape of a grid": (
        "fp8, compressed-tensors",
        with_tensor("weight_scale", lambda w: torch.ones(3, 1)),
        r"weight_scale' is \[3, 1\], wanted \[192, 1\] or \[1\]",
    ),
    "one scale for blocks": (
        "fp8, blocks",
        with_tensor("weight_scale_inv", lambda w: torch.ones(1, 1)),
        r"weight_scale_inv' is \[1, 1\], wanted \[2, 1\] beside",
    ),
    "a number for blocks": (
        "fp8, blocks",
        with_tensor("weight_scale_inv", lambda w: torch.tensor(1.0)),
        "weight_scale_inv', a part of packed weights, is F32 of shape .., wanted .* with 2 dim",
    ),
    "no codes": (
        "GPTQ 4",
        without("qweight"),
        "up_proj.g_idx' is a part .* no tensor '.*qweight' with",
    ),
    "no codes of AWQ": ("AWQ", without("qweight"), "no tensor 'model.layers.0.mlp.up_proj.qwei"),
    "no codes of fp8": (
        "fp8, blocks",
        without("weight"),
        "up_proj.weight_scale_inv' is a part of packed weights, but there is no tensor .*weight'",
    ),
    "no codes of nvfp4": (
        "nvfp4, compressed-tensors",
        without("weight_packed"),
        "is a part of packed weights, but there is no tensor .*up_proj.weight_packed' with",
    ),
    "no codes of MLX": ("MLX 4", without("weight"), "but there is no tensor '.*up_proj.weight'"),
    "index": (
        "GPTQ 4",
        with_tensor("g_idx", lambda w: torch.full((64,), 2, dtype=torch.int32)),
        "g_idx' has groups from 2 to 2, wanted 0 to 1",
    ),
    "bits": ("AWQ", with_packing(bits=3), "bits of packed weights is 3, wanted 4; download"),
    "method": ("GPTQ 4", with_packing(quant_method="exl3"), "'exl3', whose codes are trellises"),
    "unknown": ("GPTQ 4", with_packing(quant_method="x" * 9999), "quant_method is 'xxx"),
    "marlin": ("GPTQ 4", with_packing(checkpoint_format="marlin"), "weights is 'marlin'"),
    "both": (
        "GPTQ 4",
        with_tensor("weight", lambda w: torch.zeros(192, 64)),
        "both packed .* and as it is",
    ),
    "smooth": (
        "nvfp4, ModelOpt",
        with_tensor("pre_quant_scale", lambda w: torch.ones(64)),
        "changes the layer's inputs or outputs",
    ),
    "zeros": (
        "GPTQ 4",
        with_tensor("qzeros", lambda w: words(torch.zeros(2, 192).int().numpy(), 4)),
        "has zero points other than the middle, although config.json calls it symmetric",
    ),
    "infinite": (
        "int4",
        with_tensor("weight_scale", lambda w: w[f"{UP}.weight_scale"] / 0),
        "has NaN or infinite values",
    ),
    "overflow": (
        "int4",
        with_tensor("weight_scale", lambda w: w[f"{UP}.weight_scale"] * 1e8),
        "has scales that overflow the f16 numbers of q4_0",
    ),
    "not a number": (
        "mxfp4",
        with_tensor("weight_scale", lambda w: w[f"{UP}.weight_scale"] * 0 + 255),
        "has NaN or infinite values",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_packing_is_one_line(dense, tmp_path, name):
    layout, spoil, words = WRONG[name]
    folder, _ = packed_folder(dense, tmp_path, LAYOUTS[layout])
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    spoil(weights, config)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(HotsplitError, match=words) as caught:
        converted(folder, tmp_path / "m.gguf", layout="stock")
    assert len(str(caught.value)) < 600
    assert not (tmp_path / "m.gguf").exists()


def test_a_truncated_file_and_a_claim_without_packed_tensors_are_refused(dense, tmp_path):
    folder, _ = packed_folder(dense, tmp_path, LAYOUTS["AWQ"])
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(HotsplitError, match="not a whole safetensors file"):
        converted(folder, tmp_path / "m.gguf")
    shutil.copy(dense / "model.safetensors", path)
    with pytest.raises(HotsplitError, match=r"packed \(awq\), but no tensor is; remove quantiz"):
        converted(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_of_any_shape_and_type_are_read_or_refused(tmp_path, name):
    parts, _ = LAYOUTS[name].pack(np.random.default_rng(0), 64, 64)
    key = "quantization" if name.startswith("MLX") else "quantization_config"
    (tmp_path / "config.json").write_text(json.dumps({key: LAYOUTS[name].config}))
    refused = 0
    for part, tensor in parts.items():
        shapes = [(), (3,), (64,), (0, 4), (2, 64), (64, 64), (1, 64, 8)]
        others = [torch.ones(shape).to(tensor.dtype) for shape in shapes]
        others += [torch.ones(tensor.shape).to(kind) for kind in (torch.float64, torch.int64)]
        for other in others:
            stored = {f"a.{each}": own for each, own in (parts | {part: other}).items()}
            save_file(stored, tmp_path / "model.safetensors")
            try:
                checkpoint = Checkpoint.open(tmp_path)
                for matrix in checkpoint.tensors:
                    checkpoint.read(matrix)
            except HotsplitError:
                refused += 1
    assert refused >= 6


def test_act_order_is_unpacked_into_the_type_asked_for(dense, tmp_path):
    layout = Layout(LAYOUTS["GPTQ 4"].config, gptq(4, is_symmetric=True, order="act"), "f32")
    folder, values = packed_folder(dense, tmp_path, layout)
    with pytest.raises(
        HotsplitError, match="act-order: .* in another order; give an outtype: f32 keeps"
    ):
        converted(folder, tmp_path / "m.gguf", layout="stock")
    converted(folder, tmp_path / "m.gguf", outtype="f32", layout="stock")
    for source, ours, entry in matrices(tmp_path / "m.gguf"):
        assert np.array_equal(entry.read(), as_written(source, values[source].numpy())), ours
    weights = load_file(folder / "model.safetensors")  # zeros: no order but that of groups
    for name in [n for n in weights if n.endswith("g_idx")]:
        weights[name] = torch.zeros_like(weights[name])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    converted(folder, tmp_path / "groups.gguf", layout="stock")
    assert {e.kind for _, _, e in matrices(tmp_path / "groups.gguf")} == {"q4_0"}
    assert GROUP == 32

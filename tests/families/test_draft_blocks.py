"""The draft blocks of Qwen3-Next, Qwen 3.5, GLM-4.5 and the like: logits against transformers and
float64, and what files keep of them."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import save_tokenizer
from draft_blocks import CASES, logits_of_transformers, random_with_block
from reference import draft_ref, rel_error
from safetensors.torch import load_file, save_file
from test_delta_nets import rewritten

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.costs.part_bytes import draft_bytes
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry
from hotsplit.inspection.gguf_summary import summarise_gguf
from hotsplit.measure.evaluate.verify_conversion import verify

IDS = torch.randint(0, 320, (12,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of a case's checkpoint; made on first use."""
    made = {}

    def get(case):
        if case not in made:
            made[case] = random_with_block(tmp_path_factory.mktemp(case) / "hf", CASES[case])
            save_tokenizer(made[case], CASES[case].vocab_size)
        return made[case]

    return get


def converted(source, output, **options):
    config = ConvertConfig(source=source, output=output, **{"outtype": "f32", **options})
    return convert(config, verify=lambda written: [verify(written).line])


def guesses(path, ids=IDS):
    """The block's logits after each token but the first, from steps of one token, and after its own
    guess, from one pass."""
    with Engine.load(path, mode="dense", draft_block=True) as engine:
        block = engine._live.draft
        block.is_on = True
        with engine.sequence() as text:
            rows = []
            for token, following in zip(ids, ids[1:], strict=False):
                text.extend([token])
                rows.append(block.first(text.number, text.length, following))
        with engine.sequence() as text:
            text.extend(ids[:-1], "none")
            last_V = block.first(text.number, text.length, ids[-1])
            assert torch.equal(last_V, rows[-1])  # a row's bits do not depend on the others
            chained_V = block.next(text.number, int(last_V.argmax()), 1)
            # No more is known than before, and nothing of a text that was not seen.
            assert block.first(text.number, text.length, ids[-1]) is None
            block.is_on = False
            text.extend(ids[-1:])
            block.is_on = True
            text.extend(ids[:1])
            assert block.first(text.number, text.length, 1) is None
    return torch.stack(rows), chained_V


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_those_of_transformers_and_of_float64(checkpoints, tmp_path, case):
    folder, layouts = checkpoints(case), {"sparse": "m.gguf", "stock": "s.gguf"}
    want_TV, want_V = logits_of_transformers(folder, IDS)
    if case in ("qwen35", "qwen3next"):  # values of other widths than keys: not in llama.cpp
        del layouts["stock"]
    for layout, name in layouts.items():
        report = converted(folder, tmp_path / name, layout=layout)
        assert "logits equal transformers'" in report.verified
        got_TV, got_V = guesses(tmp_path / name)
        assert rel_error(got_TV, want_TV) < 1e-5 and rel_error(got_V, want_V) < 1e-5
        assert rel_error(got_TV[1:], want_TV[:-1]) > 0.1  # the measure sees another token
        assert rel_error(got_TV, draft_ref(ModelFile.load(tmp_path / name), IDS)) < 1e-5


def test_a_gguf_keeps_the_block_in_another_type_and_says_what_it_takes(checkpoints, tmp_path):
    converted(checkpoints("qwen35moe"), path := tmp_path / "m.gguf", outtype="q8_0")
    report = converted(path, tmp_path / "q4.gguf", outtype="q4_0")
    note = "the draft block is in q4_0: below 8 bits, fewer of its guesses are right"
    assert note in report.notes and "logits equal the source's" in report.verified
    model = ModelFile.load(tmp_path / "q4.gguf")
    assert model.spec.draft == ModelFile.load(path).spec.draft is not None
    own = {n: e.num_bytes for n, e in model.tensors.items() if n.startswith("blk.4.")}
    items = draft_bytes(model, 64, num_sequences=2)
    assert items.pop("kv_cache") == 2 * 64 * 2 * 2 * 24 * 2
    assert items.pop("workspace") == 2 * (128 + 512 + 64) * 4 * model.spec.hidden_size
    assert sum(items.values()) == sum(own.values())
    facts = dict(summarise_gguf(tmp_path / "q4.gguf").facts)
    assert facts["note"] == note and "of keys and values a token" in facts["draft block takes"]
    (part,) = {f.part for f in summarise_gguf(path).tensors if f.name.startswith("blk.4.")}
    assert part == "draft block"
    with Engine.load(path) as without, Engine.load(path, draft_block=True) as engine:
        assert not without.has_draft_block and engine.has_draft_block
        more = [sum(e.bytes_by_role["cpu"].values()) for e in (without, engine)]
        context = engine.context_length
        assert more[1] - more[0] == sum(draft_bytes(engine.model, context).values())


def test_a_head_and_an_embedding_of_the_blocks_own_are_used(checkpoints, tmp_path):
    converted(checkpoints("glm4moe"), path := tmp_path / "m.gguf", layout="stock")
    model = ModelFile.load(path)
    own = {
        f"blk.3.nextn.{name}.weight": array_entry(model.tensors[source].read()[::-1].copy(), "f32")
        for name, source in (
            ("embed_tokens", "token_embd.weight"),
            ("shared_head_head", "output.weight"),
        )
    }
    assert not own.keys() & model.tensors.keys()  # the checkpoint's are copies
    changed = rewritten(path, tmp_path / "own.gguf", {}, own)
    got_TV, _ = guesses(changed)
    want_TV = draft_ref(ModelFile.load(changed), IDS)
    assert rel_error(got_TV, want_TV) < 1e-5
    assert rel_error(draft_ref(model, IDS), want_TV) > 0.1
    assert (
        draft_bytes(ModelFile.load(changed), 64)["head"] == model.tensors["output.weight"].num_bytes
    )
    copies = {
        "blk.3.nextn.embed_tokens.weight": model.tensors["token_embd.weight"],
        "blk.3.nextn.shared_head_head.weight": model.tensors["output.weight"],
    }
    copied = rewritten(path, tmp_path / "copied.gguf", {}, copies)  # they are kept once
    got_TV, _ = guesses(copied)
    assert rel_error(got_TV, draft_ref(model, IDS)) < 1e-5
    with (
        Engine.load(path, draft_block=True) as alone,
        Engine.load(copied, draft_block=True) as both,
    ):
        assert both.bytes_by_role == alone.bytes_by_role
        block = both._live.weights.draft
        assert block.head is both._live.weights.head
        assert block.embedding is both._live.weights.embedding
    converted(copied, tmp_path / "again.gguf", outtype="q8_0", layout="stock")  # and written once
    converted(changed, tmp_path / "kept.gguf", outtype="q8_0", layout="stock")
    assert not copies.keys() & ModelFile.load(tmp_path / "again.gguf").tensors.keys()
    assert copies.keys() <= ModelFile.load(tmp_path / "kept.gguf").tensors.keys()


def test_the_output_norm_of_hunyuan_3s_block_has_a_name_of_its_own(checkpoints, tmp_path):
    """final_layernorm in tencent/Hy3."""
    folder = shutil.copytree(checkpoints("hunyuan3"), tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.final_layernorm.weight"] = weights.pop(
        "model.layers.3.shared_head.norm.weight"
    )
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for source, name in ((folder, "m.gguf"), (checkpoints("hunyuan3"), "n.gguf")):
        converted(source, tmp_path / name)
    got, want = (ModelFile.load(tmp_path / name).tensors for name in ("m.gguf", "n.gguf"))
    assert got.keys() == want.keys()
    for name, entry in want.items():
        assert np.array_equal(got[name].read(), entry.read()), name


def test_blocks_that_do_not_run_are_left_out_or_refused(checkpoints, tmp_path):
    folder = checkpoints("qwen35")
    weights = load_file(folder / "model.safetensors")
    other = tmp_path / "hf"
    other.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (folder / file).exists():
            (other / file).write_bytes((folder / file).read_bytes())
    second = {n.replace("mtp.layers.0.", "mtp.layers.1."): v.clone() for n, v in weights.items()}
    save_file(weights | second, other / "model.safetensors", {"format": "pt"})
    report = converted(other, tmp_path / "two.gguf")
    assert any("on which the next token does not depend" in note for note in report.notes)
    assert ModelFile.load(tmp_path / "two.gguf").spec.draft is None
    del weights["mtp.norm.weight"]
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(HotsplitError, match="no tensor for 'blk.4.nextn.shared_head_norm.weight'"):
        converted(other, tmp_path / "n.gguf")
    converted(folder, path := tmp_path / "m.gguf")
    without = {n: None for n in ModelFile.load(path).tensors if n.startswith("blk.4.")}
    counted = ModelFile.load(rewritten(path, tmp_path / "counted.gguf", {}, without))
    assert counted.num_skipped == 1 and counted.spec.draft is None and not counted.block_fault


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"nextn.enorm.weight": None}, "no tensor 'blk.4.nextn.enorm.weight'"),
        ({"attn_q.weight": None}, "no tensor 'blk.4.attn_q.weight'"),
        ({"nextn.hnorm.weight": (32,)}, "is f32 [32], wanted [64]"),
        ({"nextn.other.weight": (64,)}, "'blk.4.nextn.other.weight' is f32 [64] and unknown"),
    ],
)
def test_a_model_runs_without_a_broken_block_and_says_so(
    checkpoints, tmp_path, caplog, changed, fault
):
    converted(checkpoints("qwen35"), path := tmp_path / "m.gguf")
    own = {
        f"blk.4.{name}": shape and array_entry(np.ones(shape, np.float32), "f32")
        for name, shape in changed.items()
    }
    broken = rewritten(path, tmp_path / "broken.gguf", {}, own)
    model = ModelFile.load(broken)
    assert model.num_skipped == 1 and model.spec == replace(ModelFile.load(path).spec, draft=None)
    assert fault in model.block_fault and "\n" not in model.block_fault
    with caplog.at_level("INFO"), Engine.load(broken, draft_block=True) as engine:
        assert not engine.has_draft_block
        got_TV = engine.logits(IDS)
    assert f"the draft block is not used: {model.block_fault}" in caplog.text
    with Engine.load(path) as whole:
        assert torch.equal(got_TV, whole.logits(IDS))
    with pytest.raises(HotsplitError, match="no tensor 'blk.3.attn_q"):  # of the model itself
        ModelFile.load(rewritten(path, tmp_path / "n.gguf", {}, {"blk.3.attn_q.weight": None}))

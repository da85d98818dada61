"""Keys and values in every type: what is stored, what attention reads of it, and the loss."""

import json
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from models import make_model, make_sizes
from reference import attend_ref, rel_error, rotated

from hotsplit import Engine
from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import array_entry
from hotsplit.options.cache_types import NAMES, CacheType, CacheTypes
from hotsplit.runtime.cache.stored_rows import decode, dtype_of, turn_by_hadamard
from hotsplit.runtime.generate.prompt_cache import restore_prompt, save_prompt
from hotsplit.runtime.step.sequences import Part

IDS = torch.randint(50, (40,), generator=torch.Generator().manual_seed(1)).tolist()
PAIRS = (*((name, name) for name in NAMES), ("q8_0", "q4_0"), ("f16", "q8_0"), ("q4_0", "bf16"))
HEADS_BOUND = 5e-3  # queries meet quantised keys in 8 bits


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model with heads of 64 values, two to a key-value head."""
    shape = make_sizes(width=256, num_heads=4, num_kv_heads=2, num_layers=3, context_length=64)
    path = tmp_path_factory.mktemp("cache") / "m.gguf"
    make_model(sizes=shape, kind="f32").save(path)
    return path


def load(path, types=("f16", "f16"), **options) -> Engine:
    key, value = types
    return Engine.load(path, mode="dense", cache_type_k=key, cache_type_v=value, **options)


@pytest.mark.parametrize("width", [32, 64, 80, 96, 128, 256])
def test_turning_multiplies_by_hadamards_matrix(width):
    block = width & -width
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = np.kron(np.eye(width // block), matrix) / np.sqrt(block)
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(2))
    assert rel_error(turn_by_hadamard(x), torch.from_numpy(x.double().numpy() @ matrix)) < 1e-6
    assert rel_error(turn_by_hadamard(turn_by_hadamard(x)), x) < 1e-6


@pytest.mark.parametrize("width", [32, 64, 96, 256])
@pytest.mark.parametrize("name", NAMES)
def test_stored_rows_are_those_of_ggml(tmp_path, name, width):
    """The first layer's rows equal, bit for bit, those that the gguf package makes of the rows that
    a step with an f32 cache stores, rotated if the type says so."""
    shape = make_sizes(width=width, num_heads=1, num_kv_heads=1, context_length=64)
    make_model(sizes=shape, kind="f32").save(tmp_path / "m.gguf")
    kept = {}
    for each in ("f32", name):
        with load(tmp_path / "m.gguf", (each, each)) as engine, engine.sequence() as text:
            text.extend(IDS)
            kept[each] = text.read_state().keys_values[0]
    kind = CacheType(name)
    for plain, rows in zip(kept["f32"], kept[name], strict=True):
        turned = turn_by_hadamard(plain) if kind.is_rotated else plain
        if kind.is_blocks:
            of_ggml = GGMLQuantizationType[kind.kind.upper()]
            wanted = torch.from_numpy(quantize(turned.numpy(), of_ggml))
            assert (decode(rows, kind).numpy() == dequantize(rows.numpy(), of_ggml)).all()
        else:
            wanted = turned.to(dtype_of(kind))
            wanted = wanted.view(torch.int16) if wanted.dtype == torch.bfloat16 else wanted
        assert torch.equal(rows, wanted)


@pytest.mark.parametrize("types", PAIRS, ids=" ".join)
def test_attention_reads_what_is_stored(path, types):
    """The heads' output is that of float64 over the stored rows, and not over those of zeros in
    place of the newest token's."""
    seen = {}
    with load(path, types) as engine, engine.sequence() as text:
        with engine.observe(
            lambda name, layer, x: seen.setdefault(name, x.double().numpy().copy()),
            lambda name, layer: layer == 0 and name in ("attn_norm", "attn_heads"),
        ):
            text.extend(IDS)
        attention = engine.layers[0].attention
        spec, cache = attention.spec, attention.cache
        weight = attention.inputs[0].weight.data.double().numpy()[: spec.query_size]
        query_THW = (seen["attn_norm"] @ weight.T).reshape(len(IDS), spec.num_heads, -1)
        query_THW = rotated(query_THW, spec.rotary, spec.num_rotated)
        rows = []
        for kept, kind in zip(
            (cache.key_BKPX, cache.value_BKPX), map(CacheType, types), strict=True
        ):
            plain = decode(kept[0, :, : len(IDS)].transpose(0, 1), kind).float()
            rows.append((turn_by_hadamard(plain) if kind.is_rotated else plain).double().numpy())
        got = seen["attn_heads"].reshape(query_THW.shape)
        assert rel_error(got, attend_ref(query_THW, *rows, spec)) < HEADS_BOUND
        rows[1][-1] = 0.0
        assert rel_error(got[-1], attend_ref(query_THW[-1:], *rows, spec)[0]) > HEADS_BOUND


def check_sharing(engine: Engine, ids: list[int], alone_TV: torch.Tensor) -> None:
    """In paged blocks beside another text, in a fork, and after a rollback."""
    one, other = engine.sequence(), engine.sequence()
    both = ((one, ids[:20]), (other, ids[5:15]))
    parts = [Part(sequence=text, tokens=each, wanted="all") for text, each in both]
    assert torch.equal(one.owner.run(parts)[0], alone_TV[:20])
    branch = one.fork()
    assert torch.equal(branch.extend(ids[20:], "all"), alone_TV[20:])
    one.rollback(11)
    assert torch.equal(one.extend(ids[11:], "all"), alone_TV[11:])


@pytest.mark.parametrize("types", PAIRS, ids=" ".join)
def test_a_row_does_not_depend_on_the_others(path, types):
    """Logits have the same bits when rows are computed together, one by one, or in paged blocks
    beside another text."""
    with load(path, types) as engine, engine.sequence() as text:
        alone = torch.cat([text.extend([token]) for token in IDS])
        together = load(path, types)
    with together as engine, engine.sequence() as text:
        assert torch.equal(text.extend(IDS, "all"), alone)
    with load(path, types, num_sequences=3) as engine:
        check_sharing(engine, IDS, alone)


@pytest.mark.parametrize("types", PAIRS, ids=" ".join)
def test_a_restored_state_continues_bit_for_bit(path, tmp_path, types):
    """Also in an engine of another number of sequences than that which saved it."""
    for num_sequences in (1, 3):
        with load(path, types, num_sequences=num_sequences) as engine, engine.sequence() as text:
            text.extend(IDS[:30])
            save_prompt(text, tmp_path / "state", engine.prompt_key())
            wanted = text.extend(IDS[30:], "all")
    for num_sequences in (3, 1):
        with load(path, types, num_sequences=num_sequences) as engine, engine.sequence() as text:
            assert restore_prompt(text, tmp_path / "state", engine.prompt_key()) == 30
            assert text.ids == IDS[:30]
            assert torch.equal(text.extend(IDS[30:], "all"), wanted)
    other = ("f32", "f32") if types[0] != "f32" else ("f16", "f16")
    with (
        load(path, other) as engine,
        engine.sequence() as text,
        pytest.raises(HotsplitError, match="made with another cache type"),
    ):
        restore_prompt(text, tmp_path / "state", engine.prompt_key())


@pytest.mark.parametrize("types", PAIRS, ids=" ".join)
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_the_reported_cache_bytes_are_those_allocated(path, types, num_sequences):
    with load(path, types, num_sequences=num_sequences) as engine:
        held = [layer.attention.cache for layer in engine.layers]
        total = sum(c.key_BKPX.nbytes + c.value_BKPX.nbytes for c in held)
        assert total == engine.bytes_by_role["cpu"]["kv_cache"]
        positions = held[0].table.num_blocks * held[0].table.block_length
        assert total == 3 * positions * 2 * CacheTypes.of(*types).row_bytes(64)


def test_fewer_bits_lose_more_and_turning_loses_less(tmp_path):
    """Keys and values have one large entry in every head, like the keys of real models. It sets its
    block's scale, unless rotation spreads it."""
    shape = make_sizes(width=256, num_heads=4, num_kv_heads=2, num_layers=2, context_length=128)
    model = make_model(sizes=shape, kind="f32")
    tensors = dict(model.tensors)
    for layer, name in product(range(2), ("attn_k", "attn_v")):
        weight = tensors[f"blk.{layer}.{name}.weight"].read().copy()
        weight[[5, 64 + 9]] *= 8
        tensors[f"blk.{layer}.{name}.weight"] = array_entry(weight, "f32")
    replace(model, tensors=tensors).save(tmp_path / "m.gguf")
    ids = torch.randint(50, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    lost, exact = {}, None
    for name in NAMES:
        with load(tmp_path / "m.gguf", (name, name)) as engine, engine.sequence() as text:
            logits = text.extend(ids, "all")
        exact = logits if name == "f32" else exact
        lost[name] = rel_error(logits, exact)
    order = ["f32", "f16", "bf16", "q8_0", "q4_0"]
    assert all(lost[a] < lost[b] for a, b in pairwise(order)), lost
    assert all(lost[name] < 2 / 3 * lost[f"{name}-plain"] for name in ("q8_0", "q4_0")), lost


NARROW = "needs heads whose width is a multiple of 32, this model's have 16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_type_k": "q5_0"}, "cache type 'q5_0' is unknown; known: f32, f16, bf16, q8_0"),
        ({"cache_type_v": ""}, "cache type '' is unknown; known"),
        ({"cache_type_k": "q8_0"}, NARROW),
    ],
)
def test_unsupported_cache_types_are_refused(tmp_path, options, words):
    make_model(sizes=make_sizes(), kind="f16").save(tmp_path / "m.gguf")
    with pytest.raises(HotsplitError, match=words):
        Engine.load(tmp_path / "m.gguf", **options)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "eval"])
def test_the_commands_take_llamacpps_names(path, capsys, command):
    needed = {"eval": ["--corpus", str(path)]}.get(command, [])
    assert main([command, str(path), *needed, "-ctk", "q8_0", "-ctv", "q5_1"]) == 2
    said = capsys.readouterr().err
    assert "'--cache-type-v'" in said and "'q5_1' is not one of" in said


def eval_losses(tmp_path, capsys, option, *values) -> list[float]:
    """What eval reports of a small model, m.gguf, for each value of an option."""
    from checkpoints import random_llama

    folder = random_llama(
        tmp_path / "c", hidden_size=128, num_attention_heads=2, num_key_value_heads=1
    )
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    assert main(["convert", str(folder), "-o", str(tmp_path / "m.gguf")]) == 0
    losses = []
    for value in values:
        text = ["--corpus", str(tmp_path / "text.txt"), "--tokens", "512"]
        capsys.readouterr()
        assert main(["eval", str(tmp_path / "m.gguf"), *text, option, value, "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["kl_mean"])
    return losses


def test_eval_reports_the_cost_of_a_type(tmp_path, capsys):
    none, some = eval_losses(tmp_path, capsys, "-ctk", "f16", "q4_0")
    assert none == 0 < some

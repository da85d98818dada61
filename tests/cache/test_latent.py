"""Latent attention on the CPU: against its expanded form in float64, whatever the sizes, types of
weights and of the cache, levels and threads; what its cache holds; and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from models import latent_spec, make_model, make_sizes
from reference import Bounds, logits_ref, rel_error
from test_cache_types import check_sharing

from hotsplit import Engine
from hotsplit.costs.part_bytes import kv_bytes, kv_read
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_file import TensorEntry, type_of, write_gguf
from hotsplit.model.latent import Latent
from hotsplit.options.cache_types import NAMES, CacheTypes
from hotsplit.runtime.generate.prompt_cache import restore_prompt, save_prompt
from hotsplit.runtime.kernels.cpu import library

BOUNDS = Bounds({"f32": 1e-5, "f16": 1e-5, "q8_0": 2e-3})
# What storing keys in a type costs logits.
LOSSES = {"f32": 1e-9, "f16": 2e-3, "bf16": 2e-2, "q8_0": 0.03, "q4_0": 0.35}
IDS = torch.randint(50, (300,), generator=torch.Generator().manual_seed(1)).tolist()
OF_BLOCKS = Latent(
    query_rank=64, size=64, num_plain=32, num_rotated=32, value_size=32, epsilon=1e-6
)
ODD = Latent(query_rank=None, size=20, num_plain=12, num_rotated=6, value_size=9, epsilon=1e-3)
# As wide as DeepSeek's, with more heads than share keys among several rows.
WIDE = Latent(query_rank=32, size=512, num_plain=32, num_rotated=64, value_size=64, epsilon=1e-6)
SIZES = {"of blocks": (OF_BLOCKS, 5, "q8_0"), "odd": (ODD, 3, "f32"), "wide": (WIDE, 33, "f16")}


def saved(tmp_path, latent, num_heads, kind="f32", **sizes):
    shape = make_sizes(num_heads=num_heads, context_length=320, head_width=32, **sizes)
    model = make_model(spec=latent_spec(shape, latent), kind=kind)
    model = dataclasses.replace(model, path=tmp_path / f"{num_heads}-{kind}.gguf")
    model.save(model.path)
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("latent"), OF_BLOCKS, 5).path


def load(path, kind="f16", **options) -> Engine:
    return Engine.load(path, mode="dense", cache_type_k=kind, **options)


@pytest.mark.parametrize("case", SIZES)
def test_logits_are_those_of_the_expanded_form(tmp_path, case):
    """At every level, at the edges of tiles and parts, and with any number of threads."""
    latent, num_heads, kind = SIZES[case]
    model = saved(tmp_path, latent, num_heads, kind, num_layers=1)
    want_TV = logits_ref(model, IDS)
    for level in library.usable_levels():
        library.set_level(level)
        with load(model.path, "f32") as engine:
            got_TV = engine.logits(IDS)
            assert rel_error(got_TV, want_TV) < BOUNDS[kind]
            assert rel_error(got_TV[1:], want_TV[:-1]) > 0.1  # the measure sees another token
            for position in (0, 15, 16, 255, 256, 299):
                for count in (1, 2, 3):
                    library.set_threads(count)
                    assert torch.equal(engine._step(IDS[position], position), got_TV[position])


@pytest.mark.parametrize("kind", NAMES)
def test_a_row_does_not_depend_on_the_others(path, tmp_path, kind):
    """In paged blocks beside another text, in a fork, after a rollback, and from a saved prompt."""
    ids = IDS[:40]
    with load(path, kind) as engine, engine.sequence() as text:
        alone = torch.cat([text.extend([token]) for token in ids])
        assert text.rollback(30) is None
        save_prompt(text, tmp_path / "state", engine.prompt_key())
    with load(path, "f32") as engine:
        loss = rel_error(alone, engine.logits(ids))
        assert loss < LOSSES[kind.removesuffix("-plain")]
    with load(path, kind, num_sequences=4) as engine:
        check_sharing(engine, ids, alone)
        third = engine.sequence()
        assert restore_prompt(third, tmp_path / "state", engine.prompt_key()) == 30
        assert torch.equal(third.extend(ids[30:], "all"), alone[30:])


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_token_has_one_row_of_a_latent_and_a_key_in_each_layer(path, kind):
    row = CacheTypes.of(kind).key.row_bytes(96)
    with load(path, kind) as engine:
        model, cache = engine.model, engine.layers[0].attention.cache
        assert cache.key_BKPX.numel() * cache.key_BKPX.element_size() == 320 * row
        assert cache.value_BKPX.numel() == 0
        assert kv_bytes(model, 0, 320, CacheTypes.of(kind)) == 320 * row
        assert kv_read(model, 0, 320, CacheTypes.of(kind)) == 160 * row


def test_selected_keys_are_attended_to_alone(path):
    """With all of them selected, logits are those without a selection but for the order of sums."""
    everything = "block=32,sinks=32,window=64,top=224,candidates=4"
    with load(path, "f32") as engine, load(path, "f32", kv_offload=everything) as other:
        want_TV, got_TV = engine.logits(IDS), other.logits(IDS)
    assert rel_error(got_TV, want_TV) < 1e-5
    with load(path, "f32", kv_offload="block=16,sinks=16,window=32,top=32") as engine:
        assert rel_error(engine.logits(IDS)[-1], want_TV[-1]) > 1e-4


def test_what_is_not_supported_is_refused(path, tmp_path):
    with pytest.raises(
        HotsplitError, match="keys in q8_0 and values in f16 asked for, but .* part"
    ):
        load(path, "q8_0", cache_type_v="f16")
    narrow = saved(tmp_path, ODD, 3).path
    with pytest.raises(HotsplitError, match="a cache in q8_0 needs heads whose width"):
        load(narrow, "q8_0")


@pytest.mark.parametrize("wrong", ["key", "value", "norm"])
def test_the_comparison_rejects_wrong_matrices(tmp_path, wrong):
    """Those of two heads exchanged, or a norm without its weights."""
    model = saved(tmp_path, OF_BLOCKS, 5)
    want_TV = logits_ref(model, IDS[:20])
    with load(model.path, "f32") as engine:
        own = engine.layers[0].attention.latent
        if wrong == "norm":
            own.key_norm.weight_D.fill_(2.0)
        else:
            data = getattr(own, wrong).weight.data
            whole = data.view(5, -1)
            whole.copy_(whole.clone()[[1, 0, 2, 3, 4]])
        assert rel_error(engine.logits(IDS[:20]), want_TV) > 0.01
        assert np.isfinite(want_TV).all()


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_older_files_have_keys_and_values_in_one_matrix(tmp_path, kind):
    """The rows of each head's keys and values in turn, as llama.cpp's converter wrote them; those
    of keys become f16 unless they are f32."""
    model = saved(tmp_path, OF_BLOCKS, 5, kind)
    tensors = dict(model.tensors)
    for layer in range(model.spec.num_layers):
        own = f"blk.{layer}.attn_"
        keys, values = (
            dequantize(entry.read(), type_of(entry.kind)).reshape(entry.shape)
            for entry in (tensors.pop(f"{own}{name}_b.weight") for name in "kv")
        )
        rows = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, OF_BLOCKS.size)
        stored = quantize(np.ascontiguousarray(rows, np.float32), type_of(kind))
        tensors[f"{own}kv_b.weight"] = TensorEntry(
            shape=rows.shape, kind=kind, read_rows=lambda a, b, stored=stored: stored[a:b]
        )
    named = {k: v for k, v in model._own_keys().items() if not k.endswith("_mla")}
    lengths = {"key_length": 64, "value_length": 32, "head_count_kv": 5}
    named |= {f"deepseek2.attention.{k}": np.uint32(v) for k, v in lengths.items()}
    write_gguf(tmp_path / "old.gguf", "deepseek2", named | model.extra_keys, tensors)
    ids = IDS[:20]
    with load(model.path, "f32") as new, load(tmp_path / "old.gguf", "f32") as old:
        assert old.model.spec == new.model.spec
        kinds = {old.model.tensors[f"blk.0.attn_{name}_b.weight"].kind for name in "kv"}
        assert kinds == {kind, "f32" if kind == "f32" else "f16"}
        assert rel_error(old.logits(ids), new.logits(ids)) < (1e-5 if kind == "f32" else 0.02)

"""Which keys a token of a long text reads: tables, choice, bits, bytes, and refusals."""

import dataclasses
import json
from itertools import pairwise, product

import pytest
import torch
from case_tables import rows_of
from key_reference import choose, takes_all
from models import changed, make_model, make_sizes
from reference import rel_error, rotated
from test_cache_types import eval_losses
from test_sequences import Alone, schedule

from hotsplit import Engine
from hotsplit.cli import main
from hotsplit.errors import HotsplitError
from hotsplit.model.spec import Attention
from hotsplit.options.cache_types import CacheType, CacheTypes
from hotsplit.options.key_selection import KeySelection
from hotsplit.runtime.generate.prompt_cache import restore_prompt, save_prompt
from hotsplit.runtime.kernels.cpu import library
from hotsplit.runtime.kernels.threads import use_threads

CONTEXT, LENGTH = 320, 300
IDS = torch.randint(50, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
SMALL = "block=16,sinks=16,window=32,top=32,candidates=2"
RULES = (
    SMALL,
    f"{SMALL},summary=mean",
    SMALL.replace("candidates=2", "candidates=0"),
    "block=32,sinks=0,window=32,top=64,candidates=4",
    "block=64,sinks=64,window=64,top=64,candidates=1",
)
ALL = ("block=16,sinks=16,window=16,top=320", "block=64,sinks=0,window=320,top=64")


def save(tmp_path, width=256, heads=4, kv=2, layers=2, kind="f32"):
    shape = make_sizes(
        width=width, num_heads=heads, num_kv_heads=kv, num_layers=layers, context_length=CONTEXT
    )
    path = tmp_path / f"m{width}-{heads}-{kv}.gguf"
    make_model(sizes=shape, kind=kind).save(path)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model with heads of 64 values; two query heads share a key-value head."""
    return save(tmp_path_factory.mktemp("selection"))


def load(path, offload=SMALL, **options) -> Engine:
    return Engine.load(path, mode="dense", kv_offload=offload, **options)


def logits(path, offload, **options) -> torch.Tensor:
    with load(path, offload, **options) as engine:
        return engine.logits(IDS)


# ---- everything is chosen ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "kind"), [*((rule, "f16") for rule in ALL), (ALL[0], "q8_0"), (ALL[0], "q4_0")]
)
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_choosing_all_keys_equals_full_attention_bit_for_bit(path, rule, kind, num_sequences):
    options = {"cache_type_k": kind, "num_sequences": num_sequences}
    assert torch.equal(logits(path, rule, **options), logits(path, None, **options))


@pytest.mark.parametrize("rule", RULES)
def test_a_short_text_is_read_entirely_and_a_long_one_is_not(path, rule):
    sizes = KeySelection.parse(rule)
    entire = sizes.sinks + sizes.top + sizes.window
    full, found = logits(path, None), logits(path, rule)
    assert torch.equal(full[:entire], found[:entire])
    differs = (full != found).any(dim=1)
    assert differs[entire + sizes.block :].float().mean() > 0.9


FULL = 267  # within a block, and beyond what each rule reads entirely
READ_IN_FULL = [f"{rule},full={FULL}" for rule in (RULES[0], RULES[2], RULES[4])]


@pytest.mark.parametrize("rule", READ_IN_FULL)
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_the_first_positions_are_read_in_full(path, rule, num_sequences):
    """Their logits are those of full attention bit for bit. Nearly all later ones differ from
    those, and from the logits of the rule without `full`."""
    options = {"num_sequences": num_sequences}
    full, found = logits(path, None, **options), logits(path, rule, **options)
    assert torch.equal(full[:FULL], found[:FULL])
    assert (full != found).any(dim=1)[FULL:].float().mean() > 0.9
    never = logits(path, rule.replace(f"full={FULL}", "full=0"), **options)
    assert (never != found).any(dim=1)[FULL:].float().mean() > 0.9


def test_bytes_read_are_those_of_all_keys_within_a_full_beginning():
    width, row = 64, 2 * 2 * 64  # keys and values in f16
    rule = KeySelection.parse("window=64,top=64,sinks=64,full=4096")
    types = CacheTypes(key=CacheType("f16"), value=CacheType("f16"), selection=rule)
    assert types.read_bytes(4095, width) == 4095 * row
    assert types.read_bytes(4096, width) == 192 * row + rule.searched_bytes(4096, width)
    assert types.read_bytes(4096, width) < types.read_bytes(4095, width)


@pytest.mark.parametrize("rule", READ_IN_FULL)
def test_after_a_full_prompt_the_search_is_that_of_a_restored_one(path, tmp_path, rule):
    """A text that was read without a selection continues under the rule with the same logits."""
    with load(path, rule) as engine:
        found = engine.logits(IDS)
    with load(path, None) as engine, engine.sequence() as text:
        text.extend(IDS[:FULL], "none")
        state = text.read_state()
    with load(path, rule.removesuffix(f",full={FULL}")) as engine, engine.sequence() as text:
        text.write_state(IDS[:FULL], state)
        assert torch.equal(text.extend(IDS[FULL:], "all"), found[FULL:])


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_0-plain"])
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_kernels_and_torch_make_the_same_tables(path, rule, kind, num_sequences):
    """Torch makes its tables from the keys of the kernels' run, restored from a state."""
    with load(path, rule, cache_type_k=kind, num_sequences=num_sequences) as engine:
        with engine.sequence() as text:
            text.extend(IDS, "none")
            state = text.read_state()
            made = [tables_of(layer, text) for layer in engine.layers]
        for layer in engine.layers:
            for table in layer.attention.cache.tables.tensors:
                table.fill_(7)
        with engine.sequence() as text:
            text.write_state(IDS, state)
            for layer, expected in zip(engine.layers, made, strict=True):
                for found, wanted in zip(tables_of(layer, text), expected, strict=True):
                    assert wanted.numel() == 0 or wanted.any()
                    assert torch.equal(found, wanted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_key_that_is_not_finite_affects_only_its_own_head(path, rule, bad):
    """The block is summarised again when its last position is computed; the kernels' tables equal
    torch's."""
    size = KeySelection.parse(rule).block
    with load(path, rule) as engine, engine.sequence() as text:
        text.extend(IDS, "none")
        first = engine.layers[0].attention.cache
        first.key_BKPX[0, 1, size + 3, 5] = bad
        text.rollback(2 * size - 1)
        text.extend(IDS[2 * size - 1 : 2 * size], "none")
        found = [table[0, :, 1].clone() for table in first.tables.tensors]
        for table in first.tables.tensors:
            table.fill_(7)
        first._summarise(text.number, size, 2 * size)
        for ours, theirs in zip(found, first.tables.tensors, strict=True):
            assert torch.equal(ours.nan_to_num(-9), theirs[0, :, 1].nan_to_num(-9))
        assert found[1][1].isnan() and found[1][0] > 0


def tables_of(layer, text) -> list[torch.Tensor]:
    """The tables of all whole key blocks of a text."""
    tables = layer.attention.cache.tables
    block_N, at_N = tables.places(text.number, 0, LENGTH // tables.rule.block)
    return [tensor[block_N, :, at_N].clone() for tensor in tables.tensors]


# ---- the choice ----------------------------------------------------------------------------------


SHAPES = [*((rule, 256, 4, 2) for rule in (*RULES, *READ_IN_FULL))]
SHAPES += [(RULES[0], 160, 2, 1), (RULES[1], 96, 3, 3)]


@pytest.mark.parametrize(("rule", "width", "heads", "kv"), SHAPES)
def test_a_token_reads_the_keys_of_the_reference(tmp_path, rule, width, heads, kv):
    """The heads' output is that of float64 over the keys that the reference chooses, but where two
    keys have nearly equal scores, which is rare; and not over their neighbours."""
    path = save(tmp_path, width=width, heads=heads, kv=kv, layers=1)
    seen = {}
    with load(path, rule, cache_type_k="f32") as engine, engine.sequence() as text:
        with engine.observe(
            lambda name, layer, x: seen.setdefault(name, []).append(x.double().clone()),
            lambda name, layer: name in ("attn_norm", "attn_heads"),
        ):
            text.extend(IDS)
        (layer,), x_TD = engine.layers, torch.cat(seen["attn_norm"])
        spec, cache = layer.attention.spec, layer.attention.cache
        keys, values = (
            each.transpose(0, 1)[:LENGTH].double()
            for each in (cache.key_BKPX[0], cache.value_BKPX[0])
        )
        query_TD = x_TD @ layer.attention.inputs[0].weight.data.double()[: heads * spec.head_dim].T
        query_THW = query_TD.view(LENGTH, heads, -1).numpy()
        query_THW = torch.from_numpy(rotated(query_THW, spec.rotary, spec.num_rotated))
        errors = {0: [], 1: []}  # over the chosen keys, and over those before them
        for position, got in enumerate(torch.cat(seen["attn_heads"])):
            if takes_all(cache.tables, position):
                continue
            query_KGW = query_THW[position].view(kv, -1, spec.head_dim)
            chosen_KC = choose(
                cache.tables, text.number, position, query_KGW.float(), spec.score_scale
            )
            for shift, found in errors.items():
                want = [
                    (query_GW @ keys[chosen - shift, head].T * spec.score_scale).softmax(1)
                    @ values[chosen - shift, head]
                    for head, (query_GW, chosen) in enumerate(
                        zip(query_KGW, chosen_KC, strict=True)
                    )
                ]
                found.append(rel_error(got, torch.cat(want).flatten()) > 1e-4)
        assert len(errors[0]) > 20 and sum(errors[0]) < 0.1 * len(errors[0]) and all(errors[1])


def test_every_level_chooses_the_same_keys(path):
    """Integer sums are the same at every level. Logits differ by rounding, and by more in at most
    one row of twenty."""
    # The level amx chooses with avx512vnni's code.
    levels = [name for name in library.usable_levels() if name != "amx"]
    found = {}
    for level in levels:
        library.set_level(level)
        found[level] = logits(path, RULES[3])
    size = found["generic"].abs().amax()
    for level in levels:
        differs = (found[level] - found["generic"]).abs().amax(dim=1) > 1e-3 * size
        assert differs.float().mean() < 0.05, level


# ---- rows, sequences, states ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "kind"), [(RULES[0], "f16"), (RULES[3], "q4_0"), (READ_IN_FULL[0], "f16")]
)
def test_a_row_does_not_depend_on_the_others(path, rule, kind):
    with load(path, rule, cache_type_k=kind) as engine:
        with engine.sequence() as text:
            single = torch.cat([text.extend([token]) for token in IDS])
        for threads, counts in product((1, 2, 3), ((7, 100, 33), (128,), (1, 2, 31, 17))):
            use_threads(threads)
            bounds = [0]
            while bounds[-1] < LENGTH:
                bounds.append(min(LENGTH, bounds[-1] + counts[len(bounds) % len(counts)]))
            with engine.sequence() as text:
                rows = [text.extend(IDS[a:b], "all") for a, b in pairwise(bounds)]
            assert torch.equal(torch.cat(rows), single)


@pytest.mark.parametrize("rule", [RULES[0], RULES[1], READ_IN_FULL[0]])
def test_random_schedules_of_several_texts(path, rule):
    import random

    with load(path, rule) as single, load(path, rule, num_sequences=8) as engine:
        alone = Alone(single)
        compared = sum(schedule(engine, alone, random.Random(seed), steps=20) for seed in range(3))
    assert compared > 250


def test_a_fork_that_diverges_gets_its_own_tables(path):
    """A block that two texts share is copied with its tables when one of them writes into it."""
    with load(path, num_sequences=3) as engine, engine.sequence() as text:
        text.extend(IDS[:250], "none")
        with text.fork() as other:
            other.rollback(201)
            changed = [(token + 1) % 50 for token in IDS[201:]]
            other.extend(changed, "none")
            expected = text.extend(IDS[250:], "all")
            got = other.extend([5, 6, 7], "all")
    with load(path) as engine:
        assert torch.equal(engine.logits(IDS)[250:], expected)
        assert torch.equal(engine.logits([*IDS[:201], *changed, 5, 6, 7])[LENGTH:], got)


@pytest.mark.parametrize("at", [100, 200, 207])
def test_a_restored_state_continues_bit_for_bit(path, tmp_path, at):
    with load(path) as engine:
        expected = engine.logits(IDS)
        with engine.sequence() as text:
            text.extend(IDS[:at], "none")
            save_prompt(text, tmp_path / "s", engine.prompt_key())
    with load(path) as engine, engine.sequence() as text:
        restore_prompt(text, tmp_path / "s", engine.prompt_key())
        assert torch.equal(text.extend(IDS[at:], "all"), expected[at:])
    with (
        load(path, RULES[1]) as engine,
        engine.sequence() as text,
        pytest.raises(HotsplitError, match="another cache type: .*bounds.*, this is .*mean"),
    ):
        restore_prompt(text, tmp_path / "s", engine.prompt_key())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_the_reported_cache_bytes_are_those_allocated(path, rule, num_sequences):
    with load(path, rule, num_sequences=num_sequences) as engine:
        caches = [layer.attention.cache for layer in engine.layers]
        kept = [(c.key_BKPX, c.value_BKPX, *c.tables.tensors) for c in caches]
        taken = sum(t.numel() * t.element_size() for tensors in kept for t in tensors)
        assert engine.bytes_by_role["cpu"]["kv_cache"] == taken


# ---- refusals ------------------------------------------------------------------------------------


IMPOSSIBLE = """
 => wanted on or NAME=VALUE
off => wanted on or NAME=VALUE
top= => wanted on or NAME=VALUE
tops=4 => 'tops=4'
top=64,top=64 => 'top=64'
block=48 => 16, 32 or 64
window=1 => multiple of the block
top=0 => multiple of the block
candidates=-1 => 0 to 64
on,top=64 => 'on' in
block=64,window=32 => window=32
top=99999999999999 => multiple of the block of 32 positions, from 32 to 16777216
summary=median => wanted 'mean' or 'bounds'
full=-1 => full is -1, wanted a whole number from 0 to 16777216
"""
KINDLESS = [(5, "kv_offload is 5, wanted a string")]


@pytest.mark.parametrize(("text", "words"), [*rows_of(IMPOSSIBLE), *KINDLESS])
def test_impossible_sizes_are_refused(path, text, words):
    with pytest.raises(HotsplitError, match=words):
        load(path, text)


def test_no_context_and_a_full_one(path):
    """After a refusal the text is unchanged and can be continued."""
    for context, words in ((-1, "is -1, wanted 1 or more"), (CONTEXT + 1, "asked for")):
        with pytest.raises(HotsplitError, match=f"context.* {words}"):
            load(path, context_length=context)
    with load(path, context_length=100) as engine, engine.sequence() as text:
        want = text.extend(IDS[:99])
        with pytest.raises(HotsplitError, match="2 more tokens after 99 exceed the context of 100"):
            text.extend([1, 2])
        text.rollback(98)
        assert torch.equal(text.extend(IDS[98:99]), want)
        assert text.extend(IDS[99:100]).isfinite().all() and not text.room


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("rule", [SMALL, RULES[4], "block=64,sinks=0,window=64,top=16777216"])
def test_contexts_shorter_than_the_window(path, rule, context):
    """The shortest context, and text, has one token."""
    ids = IDS[:context]
    with load(path, rule, context_length=context) as engine:
        found = engine.logits(ids)
    with load(path, None, context_length=context) as engine:
        assert torch.equal(found, engine.logits(ids))


def test_chosen_scores_with_a_soft_cap():
    """Rows before the search begins agree closely."""
    shape = make_sizes(num_layers=1, num_heads=2, num_kv_heads=1, context_length=CONTEXT)
    plain = make_model(sizes=shape)
    spec = changed(plain.bare_spec, Attention, score_cap=0.05)
    found = []
    for model in (dataclasses.replace(plain, bare_spec=spec), plain):
        with Engine.of(model, mode="dense", kv_offload=SMALL, cache_type_k="f32") as engine:
            found.append(engine.logits(IDS[:250]))
            with engine.observe(lambda name, layer, tensor: None):
                found.append(engine.logits(IDS[:250]))
    got, want, other, _ = found
    size = want.abs().amax()
    assert ((got - want).abs().amax(dim=1) > 1e-5 * size).float().mean() < 0.1
    assert ((other - want).abs().amax(dim=1) > 1e-3 * size).float().mean() > 0.9


def test_a_window_longer_than_the_context_reads_everything(path):
    assert torch.equal(logits(path, "window=4096"), logits(path, None))


def test_the_commands_take_kv_offload(tmp_path, capsys):
    sizes = ("top=65536", "block=16,sinks=0,window=16,top=16")
    none, some = eval_losses(tmp_path, capsys, "--kv-offload", *sizes)
    assert none == 0 < some
    prompt = ["-p", "the quick brown fox jumps over the lazy dog " * 9, "-n", "3", "--temp", "0"]
    command = ["generate", str(tmp_path / "m.gguf"), *prompt, "--kv-offload"]
    assert main([*command, SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main([*command, "top=5"]) == 1
    assert "multiple of the block" in capsys.readouterr().err

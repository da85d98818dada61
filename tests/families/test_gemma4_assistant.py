"""Gemma 4's assistants: logits against transformers', files, and models that they are not for;
generate/test_equal_bytes.py has their texts."""

import dataclasses

import pytest
import torch
from assistants import logits_of_transformers, random_assistant
from checkpoints import random_model, save_tokenizer
from reference import rel_error
from safetensors.torch import load_file, save_file
from test_families import CASES, IDS, converted

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.errors import HotsplitError
from hotsplit.options.generation_options import SpeculationOptions
from hotsplit.runtime.drafting import drafting
from hotsplit.runtime.model import assistant_loader
from hotsplit.runtime.model.assistant_loader import why_not_beside

BOUND, NUM_CHAINED = 1e-5, 2
DRAFTS = SpeculationOptions(type="draft")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The checkpoints and model files of a main model and its assistant; made on first use."""
    found = {}

    def get(case):
        if case not in found:
            folder, config = tmp_path_factory.mktemp(case), CASES[case]
            sources = random_model(folder / "main", config), folder / "own"
            save_tokenizer(sources[0], 320)
            random_assistant(sources[1], config)
            models = (converted(x, x.with_suffix(".gguf"), outtype="f32") for x in sources)
            found[case] = *sources, *models
        return found[case]

    return get


def guesses(main, own, ids=IDS):
    """The logits after each token but the first, from steps of one token, and of further guesses
    after those of the last one."""
    with Engine.load(main, mode="dense") as engine, drafting(engine, DRAFTS, own):
        assistant = engine._live.draft
        with engine.sequence() as text:
            rows = []
            for token, following in zip(ids, ids[1:], strict=False):
                text.extend([token])
                rows.append(assistant.first(text.number, text.length, following).clone())
            for num in range(1, NUM_CHAINED + 1):
                rows.append(assistant.next(text.number, int(rows[-1].argmax()), num).clone())
        with engine.sequence() as text:
            text.extend(ids[:-1], "none")
            last_V = assistant.first(text.number, text.length, ids[-1]).clone()
            assert torch.equal(last_V, rows[-1 - NUM_CHAINED])
            text.rollback(3)
            again_V = assistant.first(text.number, text.length, ids[3])  # of a rejected guess
            assert torch.equal(again_V, rows[2])
            text.rollback(0)
            assert assistant.first(text.number, text.length, ids[0]) is None
    return torch.stack(rows)


@pytest.mark.parametrize("case", ["gemma4", "gemma4-stock"])
def test_the_logits_are_those_of_transformers(files, tmp_path, case):
    main_folder, own_folder, main, own = files(case)
    want_TV = logits_of_transformers(main_folder, own_folder, IDS, NUM_CHAINED)
    stock = converted(own_folder, tmp_path / "stock.gguf", outtype="f32", layout="stock")
    again = converted(stock, tmp_path / "again.gguf", layout="sparse")
    for path in (own, stock, again):
        got_TV = guesses(main, path)
        assert rel_error(got_TV, want_TV) < BOUND
    assert rel_error(got_TV[1:], want_TV[:-1]) > 0.1  # the measure sees another token


@pytest.mark.parametrize("fault", ["not ahead", "a wider window", "another layer's keys"])
def test_the_comparison_finds_faults(files, monkeypatch, fault):
    main_folder, own_folder, main, own = files("gemma4")
    want_TV = logits_of_transformers(main_folder, own_folder, IDS, NUM_CHAINED)
    load, last = assistant_loader.load_assistant, assistant_loader._last_caches
    if fault == "another layer's keys":

        def caches(weights):
            return last(dataclasses.replace(weights, layers=weights.layers[:-1]))

        monkeypatch.setattr(assistant_loader, "_last_caches", caches)

    def faulty(file, weights):
        spec = file.bare_spec
        if fault == "a wider window":
            windows = [a.window and a.window + 1 for a in spec.attentions]
            layers = zip(spec.layers, windows, strict=True)
            spec = spec.with_layers([x.with_attention(window=w) for x, w in layers])
        found = load(dataclasses.replace(file, bare_spec=spec), weights)
        if fault != "not ahead":
            return found
        layers = [
            dataclasses.replace(
                layer,
                attending=dataclasses.replace(
                    layer.attending, rotary=dataclasses.replace(layer.attending.rotary, ahead=0)
                ),
            )
            for layer in found.layers
        ]
        return dataclasses.replace(found, layers=tuple(layers))

    monkeypatch.setattr("hotsplit.runtime.drafting.load_assistant", faulty)
    assert rel_error(guesses(main, own), want_TV) > 1e-3


def test_the_head_of_centroids_is_left_out(files, tmp_path):
    """Where transformers computes a token's logit, it is that of the whole head."""
    main_folder, _, main, _ = files("gemma4-stock")
    options = {"use_ordered_embeddings": True, "num_centroids": 20}
    options |= {"centroid_intermediate_top_k": 5}
    own_folder = random_assistant(tmp_path / "own", CASES["gemma4-stock"], **options)
    weights = load_file(own_folder / "model.safetensors")
    order = torch.randperm(320, generator=torch.Generator().manual_seed(0))
    weights["masked_embedding.token_ordering"] = order
    save_file(weights, own_folder / "model.safetensors", {"format": "pt"})
    want_TV = logits_of_transformers(main_folder, own_folder, IDS, 0)
    got_TV = guesses(main, converted(own_folder, tmp_path / "own.gguf", outtype="f32"))
    is_computed_TV = want_TV > want_TV.min(1, keepdim=True).values
    assert (is_computed_TV.sum(1) == 5 * 16).all()
    assert rel_error(got_TV[: len(want_TV)][is_computed_TV], want_TV[is_computed_TV]) < BOUND


def test_an_assistant_runs_beside_its_model_alone(files, tmp_path, caplog):
    _, _, main, own = files("gemma4")
    with pytest.raises(HotsplitError, match="is an assistant, a draft model .* with -md"):
        Engine.load(own)
    others = {
        "is an assistant for Gemma 4, which this": random_model(tmp_path / "o", CASES["llama"]),
        "has 331 tokens, and this model 320": files("gemma4-stock")[0],
    }
    for words, folder in others.items():
        path = converted(folder, tmp_path / f"{len(words)}.gguf")
        with Engine.load(path) as engine:
            with pytest.raises(HotsplitError, match=words), drafting(engine, DRAFTS, own):
                pass
            auto = SpeculationOptions(type="auto")
            with drafting(engine, auto, own) as made:  # goes on without it
                assert words in caplog.text and made is not None and not engine.has_draft_block


def changed(file, **numbers):
    spec = file.bare_spec
    layers = [layer.with_attention(**numbers) for layer in spec.layers]
    return dataclasses.replace(file, bare_spec=spec.with_layers(layers))


def test_why_it_cannot_run_beside_a_model(files):
    file, main = (ModelFile.load(path) for path in (files("gemma4")[3], files("gemma4")[2]))
    wide = dataclasses.replace(file.bare_spec.first[0], main_size=128)
    wide = dataclasses.replace(file, bare_spec=dataclasses.replace(file.bare_spec, first=(wide,)))
    with Engine.of(main, device="cpu") as engine:
        weights = engine._live.weights
        assert not why_not_beside(file, weights)
        words = "reads 4 heads of 24 values of a layer with a window, where this model has 2 of 24"
        assert why_not_beside(changed(file, num_kv_heads=4), weights) == words
        words = (
            "is an assistant for a model with hidden states of 128 values, and this one's have 64"
        )
        assert why_not_beside(wide, weights) == words
        spec = weights.spec.with_layers(weights.spec.layers[1:])
        full = dataclasses.replace(weights, spec=spec, layers=weights.layers[1:])
        words = "reads a layer with a window, of which this model has none"
        assert why_not_beside(file, full) == words

"""Vectors of texts: pooled as the model's files say, and equal to transformers' hidden states,
alone and beside texts that are being written."""

import base64
import json

import numpy as np
import openai
import pytest
import torch
from checkpoints import random_llama
from serving import Served, save_model
from test_serve_scheduler import SAMPLINGS, Bench
from transformers import AutoModel

from hotsplit import Engine
from hotsplit.artifacts.model_file import ModelFile
from hotsplit.convert.convert import convert
from hotsplit.convert.options import ConvertConfig
from hotsplit.convert.pooling import pooling_of
from hotsplit.errors import HotsplitError
from hotsplit.families.key_reader import KeyReader
from hotsplit.serve.texts import EmbeddingJob, Ended, Pool

IDS = [7, 200, 33, 41, 41, 9, 3, 180, 65, 250, 12]
KEY = "llama.pooling_type"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = random_llama(tmp_path_factory.mktemp("checkpoint"), hidden_act="silu")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    return folder


@pytest.fixture(scope="module")
def model(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    convert(ConvertConfig(source=folder, output=path, outtype="f32"))
    return path


@pytest.fixture(scope="module")
def want_TD(folder):
    """transformers' hidden states after the last norm."""
    base = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return base(torch.tensor([IDS])).last_hidden_state[0].double().numpy()


def pooled(states_TD, pooling):
    return {"mean": states_TD.mean(axis=0), "cls": states_TD[0], "last": states_TD[-1]}[pooling]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("most", [1, 4, 99])
def test_pooled_states_are_transformers(model, want_TD, pooling, most):
    with Engine.load(model, context_length=64, mode="dense") as engine, engine.sequence() as text:
        pool = Pool(pooling)
        for at in range(0, len(IDS), most):
            pool.add(engine.hidden_states(text, IDS[at : at + most]))
    want_D = pooled(want_TD, pooling)
    error = np.linalg.norm(pool.vector_D - want_D) / np.linalg.norm(want_D)
    assert error < 1e-5
    others = {name: pooled(want_TD, name) for name in ("mean", "cls", "last") if name != pooling}
    assert all(np.linalg.norm(pool.vector_D - other) > 0.1 for other in others.values())


def test_the_file_says_how(model):
    loaded = ModelFile.load(model)
    assert loaded.bare_spec.pooling == "last"
    again = model.with_name("again.gguf")  # of a GGUF
    convert(ConvertConfig(source=model, output=again, outtype="q8_0"))
    assert ModelFile.load(again).bare_spec.pooling == "last"


MEAN = {"pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    "values, pooling, words",
    [
        (MEAN | {"pooling_mode_cls_token": False}, "mean", ()),
        ({"pooling_mode": "cls"}, "cls", ()),
        (MEAN | {"pooling_mode_max_tokens": True}, None, ("max_tokens",)),
        ({"pooling_mode": "weightedmean"}, None, ("weightedmean",)),
    ],
)
def test_what_sentence_transformers_say(tmp_path, values, pooling, words):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(values))
    found, notes = pooling_of(tmp_path)
    assert found == pooling and len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))
    modules = [{"idx": 2, "type": "sentence_transformers.models.Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert "Dense" in pooling_of(tmp_path)[1][-1]


@pytest.mark.parametrize("number, words", [(4, "ranks"), (9, "unknown")])
def test_another_pooling_is_refused(model, number, words):
    loaded = ModelFile.load(model)
    keys = loaded._own_keys() | {"general.architecture": "llama", KEY: np.uint32(number)}
    with pytest.raises(HotsplitError, match=words):
        KeyReader(model, keys, loaded.tensors).model()


def test_texts_beside_it_stay_the_same(tmp_path):
    """Keys and values of a text that is embedded are not shared, and its turn ends."""
    bench = Bench(save_model(tmp_path, context_length=300))
    try:
        ids = [5 + n % 90 for n in range(200)]
        found = []
        job = EmbeddingJob(ids=ids, pooling="mean")
        bench.submit("a", ids[:20])
        bench.scheduler.step()
        bench.scheduler.submit([job, job], lambda number, event: found.append((number, event)))
        bench.scheduler.step()
        bench.submit("b", ids)
        bench.finish()
        for key, prompt, shared in (("a", ids[:20], 0), ("b", ids, 20)):  # with each other
            assert bench.tokens[key] == bench.alone(prompt, SAMPLINGS[0])
            assert bench.ended[key].cached_tokens == shared
        assert [number for number, _ in found] == [0, 1]
        first, second = (event for _, event in found)
        assert isinstance(first, Ended) and (first.vector_D == second.vector_D).all()
        assert first.report.prompt_tokens == 200 and first.report.generated_tokens == 0
    finally:
        bench.close()


def test_openais_client(model):
    with Served(model, "--parallel", "2") as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

        def vectors(given, **more):
            answer = client.embeddings.create(model="any", input=given, **more)
            assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
            return np.array([entry.embedding for entry in answer.data]), answer.usage

        with Engine.load(model, context_length=64) as engine, engine.sequence() as text:
            want_D = engine.hidden_states(text, IDS)[-1].double().numpy()
        want_D /= np.linalg.norm(want_D)
        by_ids, usage = vectors(IDS)  # base64, which this client asks for unless told
        assert np.abs(by_ids[0] - want_D).max() < 1e-6
        assert usage.prompt_tokens == usage.total_tokens == len(IDS)
        both, usage = vectors(["the lazy dog", "a fox"], encoding_format="float")
        assert np.allclose(np.linalg.norm(both, axis=1), 1) and not np.allclose(both[0], both[1])
        assert (vectors("a fox")[0][0] == both[1].astype(np.float32)).all()
        short, _ = vectors([IDS, IDS[:3]], dimensions=8)
        assert short.shape == (2, 8)
        assert np.abs(short[0] - want_D[:8] / np.linalg.norm(want_D[:8])).max() < 1e-6
        status, answer = served.ask(
            "/v1/embeddings", {"input": "a", "encoding_format": "base64", "user": "b"}
        )
        raw = base64.b64decode(answer["data"][0]["embedding"])
        assert status == 200 and len(np.frombuffer(raw, "<f4")) == 64
        wrong = ({"input": x} for x in ([], [[]], [320], "a " * 200))
        for body in (*wrong, {}, {"dimensions": 65}, {"encoding_format": "int8"}):
            param = next(iter(body), "input")
            given = {"input": "a"} | body if body else {}
            status, answer = served.ask("/v1/embeddings", given)
            assert status == 400 and answer["error"]["param"] == param, body
        assert not any("does not say" in line for line in served.log)

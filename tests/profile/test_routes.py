"""`profile --routes`: choices that another engine recorded, against our own counts of one text."""

import json

import numpy as np
import pytest
from models import make_model
from test_experts import ROUTES, mixture

from hotsplit import Engine
from hotsplit.artifacts.profile_file import MAX_RECORDED, Profile
from hotsplit.cli import main
from hotsplit.profile.count.counting import Counter, experts_of, gates_of, routing_of

IDS = [5, 9, 3, 17, 2, 8, 4, 4, 11, 6, 30, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A mixture whose first layer has no experts, m.gguf."""
    folder = tmp_path_factory.mktemp("routes")
    mixture(route=ROUTES["groups"], num_dense=1).save(folder / "m.gguf")
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    """(our own counts of a text, the choices of its routers [T, L, K], of all layers)."""
    with Engine.load(folder / "m.gguf", mode="dense") as engine:
        model, chosen = engine.model, {}
        counter = Counter(gates_of(model), model.spec.most_neurons, experts_of(model))
        with (
            engine.observe(counter.observe, counter.wants),
            engine.observe(
                lambda name, layer, tensor: chosen.update({layer: tensor.clone().numpy()}),
                lambda name, layer: name == "ffn_experts",
            ),
        ):
            engine.logits(IDS)
    layers = [
        chosen.get(n, np.zeros((len(IDS), 4), np.int64)) for n in range(len(model.spec.layers))
    ]
    return counter.arrays(), np.stack(layers, axis=1)


def counted(folder, capsys, path) -> Profile:
    out = folder / "p.safetensors"
    words = ["profile", str(folder / "m.gguf"), "--routes", str(path), "-o", str(out), "--force"]
    assert main(words) == 0, capsys.readouterr().err
    return Profile.load(out)


def written(folder, id_TLK, form: str):
    path = folder / f"routes.{form.split()[-1]}"
    if form.startswith("mixed"):  # of the layers with experts alone
        id_TLK = id_TLK[:, 1:]
    halves = id_TLK[:5].astype(np.int16), id_TLK[5:].astype(np.int16)
    if path.suffix == ".npy":
        np.save(path, id_TLK.astype(np.int32))
    elif path.suffix == ".npz":
        np.savez(path, *halves)
    else:
        prompt, text = (half.tolist() for half in halves)
        lines = [{"prompt_routed_experts": prompt, "choices": [{"routed_experts": text}]}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("form", ["all npy", "mixed npy", "all npz", "mixed jsonl"])
def test_recorded_choices_are_our_own_counts(folder, seen, capsys, form):
    own, id_TLK = seen
    found = counted(folder, capsys, written(folder, id_TLK, form))
    assert found.num_tokens == len(IDS) and found.corpora[0].num_tokens == len(IDS)
    assert np.array_equal(found.expert_count_LE, own["expert_count_LE"].numpy())
    assert np.array_equal(found.routing_LTK, routing_of(own))
    assert np.array_equal(found.active_count_LF, own["active_count_LF"].numpy())  # SiLU: all fire


def test_many_tokens_are_counted_and_the_first_recorded(folder, seen, capsys):
    _, id_TLK = seen
    times = MAX_RECORDED // len(IDS) + 2
    path = written(folder, np.tile(id_TLK, (times, 1, 1)), "all npy")
    found = counted(folder, capsys, path)
    assert found.num_tokens == times * len(IDS)
    assert found.routing_LTK.shape[1] == MAX_RECORDED
    merged = found.merge(counted(folder, capsys, written(folder, id_TLK, "all npz")))
    assert merged.num_tokens == (times + 1) * len(IDS)


def changed(change):
    def write(folder, id_TLK):
        np.save(folder / "wrong.npy", change(id_TLK.copy()))
        return folder / "wrong.npy"

    return write


def of_text(text: str, name: str):
    def write(folder, _):
        (folder / name).write_text(text)
        return folder / name

    return write


def set_to(value):
    def change(id_TLK):
        id_TLK[3, 1, 0] = value
        return id_TLK

    return change


@pytest.mark.parametrize(
    "write, says",
    [
        (changed(set_to(12)), "expert 12 in layer 1, which has 12"),
        (changed(set_to(-1)), "expert -1 in layer 1"),
        (changed(lambda a: np.repeat(a[:, :, :1], 4, axis=2)), "names an expert twice"),
        (changed(lambda a: a[:, :, :3]), "chooses 4: of another model?"),
        (changed(lambda a: np.tile(a, (1, 3, 1))), "of another model?"),
        (changed(lambda a: a.astype(np.float32)), "is float32"),
        (changed(lambda a: a[0]), "wanted .npy"),
        (changed(lambda a: a[:0]), "no tokens"),
        (changed(lambda a: a.astype(object)), "cannot be read"),
        (of_text("", "none.jsonl"), "no tokens"),
        (of_text('{"choices": [{"text": "a"}]}\n', "a.jsonl"), "--enable-return-routed-experts"),
        (of_text("[1]\n", "b.jsonl"), "line 1 is no response"),
        (of_text("{\n", "c.jsonl"), "cannot be read"),
        (of_text("abc", "d.npy"), "cannot be read"),
        (of_text("abc", "e.txt"), "wanted .npy or .npz"),
        (of_text("PK\x03\x04abc", "f.npz"), "File is not a zip file"),
        (of_text("abc", "g.npz"), "no array of numpy's"),
        (lambda folder, _: folder / "none.npz", "none.npz: No such file"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(folder, seen, capsys, write, says):
    path, out = write(folder, seen[1]), folder / "refused.safetensors"
    capsys.readouterr()
    words = ["profile", str(folder / "m.gguf"), "--routes", str(path), "-o", str(out)]
    assert main(words) == 1 and not out.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and str(path) in line and "allow_pickle" not in line


def test_options_of_text_and_models_without_experts_are_refused(folder, seen, capsys, tmp_path):
    path, out = written(folder, seen[1], "all npy"), str(tmp_path / "p.safetensors")
    words = ["profile", str(folder / "m.gguf"), "--routes", str(path), "-o", out]
    assert main([*words, "--tokens", "9"]) == 2
    assert "--tokens has no effect with --routes" in capsys.readouterr().err
    make_model().save(tmp_path / "d.gguf")
    assert main(["profile", str(tmp_path / "d.gguf"), *words[2:]]) == 1
    assert "has no experts, so there are no choices" in capsys.readouterr().err

"""Reading corpora, sampling from them, refusals, and counting. Oracles: the files' own text, and
for counts their definition in numpy."""

import hashlib
import json
import os

import numpy as np
import pytest
import torch
from forked import run_command

from hotsplit import Engine
from hotsplit.artifacts.profile_file import EDGES, NUM_BINS
from hotsplit.errors import HotsplitError
from hotsplit.files.atomic import CHUNK_BYTES
from hotsplit.profile.collect import profile
from hotsplit.profile.corpus import sources
from hotsplit.profile.corpus.corpus import read_windows, stretches
from hotsplit.profile.corpus.sources import BLOCK_BYTES, TextSource, find_sources, sha256_of_text
from hotsplit.profile.count.counting import histogram
from hotsplit.profile.native.counting_library import count
from hotsplit.profile.profile_config import ProfileConfig

WORDS = ["fox ", "ünï ", "数字 ", "🦊 ", "line\n", "\n", "a" * 50]


def text_of(seed, num_words=4000, words=WORDS):
    return "".join(np.random.default_rng(seed).choice(words, num_words))


@pytest.mark.parametrize("words", [WORDS, ["🦊數ü"], ["x\n"], ["y" * BLOCK_BYTES + "\n"]])
@pytest.mark.parametrize("size", [1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 50_000])
def test_the_blocks_of_a_text_are_the_text(tmp_path, words, size):
    data = text_of(0, 20_000, words).encode()[:size].decode(errors="ignore").encode()
    (tmp_path / "t.txt").write_bytes(data)
    source = TextSource("t", tmp_path / "t.txt", len(data))
    blocks = [source.texts(block)[0] for block in range(source.num_blocks)]
    assert "".join(blocks).encode() == data
    assert max([len(block.encode()) for block in blocks], default=0) <= 2 * BLOCK_BYTES


def test_stretches_cover_each_text_once_over_all_turns():
    texts = ["short", "x" * 30_000 + "y" * 30_000, "tail"]
    found = [s for turn in range(8) for s in stretches(texts, turn, shift=3)]
    assert sum(s.count("x") for s in found) == sum(s.count("y") for s in found) == 30_000
    assert sum("short" in s for s in found) == sum("tail" in s for s in found) == 1
    assert max(map(len, found)) < 2 * 8192


def windows_of(model, *paths, **options):
    with Engine.load(model, mode="dense") as engine:
        return read_windows(
            paths, engine.codec, **{"context_length": 64, "max_tokens": 1000, "seed": 0, **options}
        )


def decoded(model, windows):
    with Engine.load(model, mode="dense") as engine:
        return "".join(engine.codec.tokenizer.decode(ids.tolist()) for ids in windows.ids)


@pytest.mark.parametrize(
    "count, lengths", [(128, [64, 64]), (129, [64, 64]), (130, [64, 64, 2]), (1, [1])]
)
def test_a_last_window_of_one_token_is_left_out(tmp_path, codec_model, count, lengths):
    (tmp_path / "t.txt").write_text(text_of(0))
    found = windows_of(codec_model, tmp_path / "t.txt", max_tokens=count, must_fill=True)
    assert [len(ids) for ids in found.ids] == lengths
    assert sum(corpus.num_tokens for corpus in found.corpora) == sum(lengths)


def test_json_lines_and_parquet_hold_every_record_once(tmp_path, codec_model):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    records = [f"<{n}>" + "w" * (n * 37 % 900) for n in range(150)] + ["z" * 20_000]
    lines = [json.dumps({"body": text, "id": n}) for n, text in enumerate(records)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
    table = pyarrow.table({"body": records, "id": range(len(records))})
    parquet.write_table(table, tmp_path / "b.parquet", row_group_size=40)
    for name in ("a.jsonl", "b.parquet"):
        (source,) = find_sources([tmp_path / name], "body")
        texts = [text for block in range(source.num_blocks) for text in source.texts(block)]
        assert texts == records
        found = windows_of(codec_model, tmp_path / name, text_key="body", max_tokens=10**6)
        assert decoded(codec_model, found).count("z") == 20_000
        with pytest.raises(HotsplitError, match="'text', found .*--text-key"):
            windows_of(codec_model, tmp_path / name)


def test_parquet_without_pyarrow_is_refused_in_one_line(tmp_path, codec_model, monkeypatch):
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(HotsplitError, match=r"not a parquet file"):
        windows_of(codec_model, tmp_path / "b.parquet")
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(HotsplitError, match="pip install pyarrow"):
        windows_of(codec_model, tmp_path / "b.parquet")


def test_windows_do_not_depend_on_the_order_of_a_listing(tmp_path, codec_model, monkeypatch):
    for n in range(5):
        path = tmp_path / "c" / f"d{n % 2}" / f"f{n}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(n))
    (tmp_path / "c" / ".hidden.txt").write_text("hidden " * 1000)
    (tmp_path / "c" / "empty.txt").write_text("")
    (tmp_path / "c" / "picture.png").write_bytes(b"\xff")
    first = windows_of(codec_model, tmp_path / "c", max_tokens=20_000)
    walk = os.walk

    def backwards(*args, **options):
        for parent, folders, files in walk(*args, **options):
            folders.reverse()
            yield parent, folders, files[::-1]

    monkeypatch.setattr(sources.os, "walk", backwards)
    again = windows_of(codec_model, tmp_path / "c", max_tokens=20_000)
    other = windows_of(codec_model, tmp_path / "c", max_tokens=20_000, seed=1)
    assert again.sha256 == first.sha256 != other.sha256
    assert again.corpora == first.corpora
    for corpus in first.corpora:
        data = (tmp_path / "c" / corpus.name).read_bytes()
        assert corpus.sha256 == hashlib.sha256(data).hexdigest()


def test_a_huge_file_is_not_read_whole(tmp_path, codec_model, monkeypatch):
    """10 MB, 1,000 tokens: besides what the sha256 reads, less than 3 MB are read, at most two
    blocks at a time."""
    (tmp_path / "t.txt").write_text("0123456789abcde\n" * 640_000)
    monkeypatch.setattr("hotsplit.profile.corpus.corpus.sha256_of_text", lambda source: "0" * 64)
    read = []
    opened = sources.opened

    class Counting:
        def __init__(self, file):
            self.file = file

        def seek(self, offset):
            self.file.seek(offset)

        def read(self, size):
            read.append(size)
            return self.file.read(size)

    from contextlib import contextmanager

    @contextmanager
    def counted(path):
        with opened(path) as file:
            yield Counting(file)

    monkeypatch.setattr(sources, "opened", counted)
    windows_of(codec_model, tmp_path / "t.txt")
    assert 0 < sum(read) < 3e6
    assert max(read) <= 2 * BLOCK_BYTES


def test_not_utf8_says_which_byte(tmp_path, codec_model):
    """With a byte in front, the first chunk ends in the middle of a character."""
    for front in (b"", b"a"):
        data = front + ("ü" * (1 << 20)).encode()
        for character in (CHUNK_BYTES // 2, CHUNK_BYTES // 2 - 1, CHUNK_BYTES // 2 + 5):
            at = len(front) + 2 * character
            (tmp_path / "t.txt").write_bytes(data[: at + 1] + b"\xff" + data[at + 2 :])
            (source,) = find_sources([tmp_path / "t.txt"], "text")
            with pytest.raises(HotsplitError, match=rf"not UTF-8 text \(byte {at}\)"):
                sha256_of_text(source)
    (tmp_path / "u.txt").write_bytes(b"good\n" * 5 + b"\xe2\x82")
    with pytest.raises(HotsplitError, match=r"byte 25\)"):
        windows_of(codec_model, tmp_path / "u.txt")


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.jsonl", b'{"text": "x"}\nnonsense\n', "byte 14: not JSON"),
        ("a.jsonl", b"[1]\n", "no text at key 'text', found list"),
        ("a.jsonl", b'{"text": 5}', "no text at key"),
        ("a.jsonl", b"", "empty corpus"),
        ("a.txt", b" \n", "empty corpus"),
        ("a/b.bin", b"x", "no corpus in it; wanted files named"),
    ],
)
def test_invalid_corpora_are_refused(tmp_path, codec_model, name, content, words):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    given = path.parent if "/" in name else path
    with pytest.raises(HotsplitError, match=words):
        windows_of(codec_model, given)


def test_fewer_tokens_than_asked_for_are_refused_and_nothing_is_written(tmp_path, codec_model):
    (tmp_path / "t.txt").write_text("fox " * 100)
    config = {"model": codec_model, "corpora": (tmp_path / "t.txt",), "output": tmp_path / "p"}
    before = sorted(tmp_path.iterdir())
    with pytest.raises(HotsplitError, match="400 tokens in all, --tokens asks for 401"):
        profile(ProfileConfig(**config, max_tokens=401))
    assert sorted(tmp_path.iterdir()) == before
    assert profile(ProfileConfig(**config)).num_tokens == 400
    assert profile(ProfileConfig(**config, max_tokens=391, force=True)).num_tokens == 391


@pytest.mark.parametrize("context, least", [(64, 16), (15, 15)])
def test_too_short_a_text_is_refused_with_the_length_that_is_enough(
    tmp_path, codec_model, context, least
):
    for length in (least - 1, least):
        (tmp_path / f"{length}.txt").write_text("x" * length)
    with pytest.raises(HotsplitError, match=f"no text of {least} tokens or more"):
        windows_of(codec_model, tmp_path / f"{least - 1}.txt", context_length=context)
    found = windows_of(codec_model, tmp_path / f"{least}.txt", context_length=context)
    assert [len(ids) for ids in found.ids] == [least]


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path, codec_model):
    (tmp_path / "t.txt").write_text("fox " * 100)
    with pytest.raises(HotsplitError, match=r"token \d+ of the tokenizer \(256 tokens\).* of 50"):
        windows_of(codec_model, tmp_path / "t.txt", vocab_size=50)


def test_standard_input_is_a_corpus(tmp_path, codec_model):
    (tmp_path / "t.txt").write_text(text_of(0))
    found = []
    for corpus, stdin in ((tmp_path / "t.txt", None), ("-", (tmp_path / "t.txt").open())):
        done = run_command(
            "profile",
            codec_model,
            "--corpus",
            corpus,
            "-o",
            tmp_path / "p",
            "--tokens",
            500,
            "--json",
            "--force",
            stdin=stdin.fileno() if stdin else b"",
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["density_L"])
    assert found[0] == found[1]


# ---- counting --------------------------------------------------------------------------------


def bins_by_definition(values):
    edges = EDGES.astype(np.float32)
    return np.bincount(
        np.searchsorted(edges, np.abs(values).ravel(), side="right") - 1, minlength=NUM_BINS
    )


def awkward_values(shape, seed=0):
    random = np.random.default_rng(seed)
    values = (random.standard_normal(shape) * 2.0 ** random.integers(-30, 12, shape)).astype("f4")
    edges = EDGES.astype(np.float32)
    special = np.concatenate(
        [edges, np.nextafter(edges, np.inf), np.nextafter(edges, -1), [0, -0.0, 1e-40, 3e38]]
    )
    flat = values.reshape(-1)
    flat[: len(special)] = special[: len(flat)]
    return torch.from_numpy(values)


@pytest.mark.parametrize("num_neurons", [1, 15, 16, 17, 700])
@pytest.mark.parametrize("threshold, is_magnitude", [(0.0, False), (0.01, False), (0.3, True)])
def test_counts_and_bins_match_their_definition(num_neurons, threshold, is_magnitude):
    value_TF = awkward_values((33, num_neurons))
    value = value_TF.numpy()
    fires = (np.abs(value) if is_magnitude else value) > np.float32(threshold)
    count_F, histogram_B = torch.ones(num_neurons).long(), torch.ones(NUM_BINS).long()
    count(value_TF, threshold, count_F, histogram_B, is_magnitude=is_magnitude)
    assert (count_F.numpy() - 1 == fires.sum(0)).all()
    assert (histogram_B.numpy() - 1 == bins_by_definition(value * fires)).all()
    assert (histogram(value_TF).numpy() == bins_by_definition(value)).all()  # the GPU's way
    assert (histogram(value_TF * 1.1).numpy() != bins_by_definition(value)).any()

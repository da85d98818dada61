"""GGUFs named as on the hub, which a local server stands for."""

import dataclasses
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from functools import partialmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar
from urllib.parse import unquote

import numpy as np
import pytest
from checkpoints import random_llama
from models import byte_level_keys, make_model, make_sizes
from packed_layouts import LAYOUTS
from published_headers import HEADERS, write_parts
from test_packed import packed_folder

from hotsplit.cli import main
from hotsplit.convert import hub, hub_headers
from hotsplit.errors import HotsplitError
from hotsplit.files import gguf_file
from hotsplit.files.gguf_file import TensorEntry, read_gguf
from hotsplit.files.gguf_parts import part_paths

NAME, COMMIT = "some-org/tiny-GGUF", "1" * 40


@dataclasses.dataclass(frozen=True)
class Sparse:
    """The bytes of a file, as far as they are asked for."""

    path: Path

    def __len__(self) -> int:
        return self.path.stat().st_size

    def __getitem__(self, part: slice) -> bytes:
        with self.path.open("rb") as file:
            file.seek(part.start)
            return file.read(part.stop - part.start)


class FakeHub(BaseHTTPRequestHandler):
    """The hub's API as its client asks it, for one repository whose files are in `files`."""

    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []
    sends_parts: ClassVar[bool] = True
    num_bytes: ClassVar[int] = 0  # sent in parts
    revisions: ClassVar[set[str]] = set()  # asked for

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{NAME}"):
            if found_revision := re.search("/(revision|tree)/([^/]+)", path):
                self.revisions.add(unquote(found_revision[2]))
            if "missing" in self.revisions:
                self.reply(b"", {"X-Error-Code": "RevisionNotFound"}, 404)
                return
            siblings = [{"rfilename": name} for name in self.files]
            found: object = {"id": NAME, "sha": COMMIT, "siblings": siblings}
            if "/tree/" in path:
                found = [
                    {"type": "file", "path": name, "size": len(data), "oid": name.encode().hex()}
                    for name, data in self.files.items()
                ]
            self.reply(json.dumps(found).encode())
            return
        if not path.startswith(f"/{NAME}/resolve/"):
            self.send_error(404)
            return
        name = path.removeprefix(f"/{NAME}/resolve/").partition("/")[2]
        data, headers = (
            self.files[name],
            {"ETag": f'"{name.encode().hex()}"', "X-Repo-Commit": COMMIT},
        )
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is not None and self.sends_parts and self.command == "GET":
            part = data[int(asked[1]) : int(asked[2]) + 1]
            place = f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(data)}"
            FakeHub.num_bytes += len(part)
            self.reply(part, {**headers, "Content-Range": place}, 206)
            return
        if self.command == "GET":  # counted first: who has its answer looks at the count
            self.asked.append(name)
        self.reply(data, headers)

    do_HEAD = do_GET

    def reply(
        self, body: bytes, headers: Mapping[str, str] = MappingProxyType({}), code: int = 200
    ) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def files(tmp_path, monkeypatch) -> Iterator[dict[str, bytes]]:
    """The files of the repository, some of which are only names."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    names = (
        "README.md",
        "tiny-Q4_K_M.gguf",
        "tiny-Q8_0-00001-of-00002.gguf",
        "tiny-Q8_0-00002-of-00002.gguf",
        "mmproj-F16.gguf",
        "UD/tiny-UD-Q2_K_XL.gguf",
        "tiny-UD-Q4_K_M.gguf",
        "mtp-tiny-Q8_0.gguf",
    )
    monkeypatch.setattr(FakeHub, "files", {name: name.encode() for name in names})
    monkeypatch.setattr(FakeHub, "asked", [])
    monkeypatch.setattr(FakeHub, "num_bytes", 0)
    monkeypatch.setattr(FakeHub, "revisions", set())
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield FakeHub.files
        server.shutdown()


@pytest.mark.parametrize(
    "name, wanted",
    [
        (NAME, ["tiny-Q4_K_M.gguf"]),
        (f"{NAME}:UD-Q4_K_M", ["tiny-UD-Q4_K_M.gguf"]),
        (f"{NAME}:q4_k_m", ["tiny-Q4_K_M.gguf"]),
        (f"hf.co/{NAME}:Q8_0", ["tiny-Q8_0-00001-of-00002.gguf", "tiny-Q8_0-00002-of-00002.gguf"]),
        (f"https:/huggingface.co/{NAME}:UD-Q2_K_XL", ["UD/tiny-UD-Q2_K_XL.gguf"]),
        (f"hf://{NAME}:Q8_0", ["tiny-Q8_0-00001-of-00002.gguf", "tiny-Q8_0-00002-of-00002.gguf"]),
        (f"{NAME}:tiny-UD-Q4_K_M.gguf", ["tiny-UD-Q4_K_M.gguf"]),
        (f"{NAME}:tiny-UD-Q4_K_M", ["tiny-UD-Q4_K_M.gguf"]),
        (f"{NAME}:UD/tiny-UD-Q2_K_XL.gguf", ["UD/tiny-UD-Q2_K_XL.gguf"]),
        (f"{NAME}:tiny-UD-Q2_K_XL.gguf", ["UD/tiny-UD-Q2_K_XL.gguf"]),
        (f"{NAME}:mtp-tiny-Q8_0.gguf", ["mtp-tiny-Q8_0.gguf"]),
        (
            f"{NAME}:tiny-Q8_0-00002-of-00002.gguf",
            ["tiny-Q8_0-00001-of-00002.gguf", "tiny-Q8_0-00002-of-00002.gguf"],
        ),
        (f"https://huggingface.co/{NAME}/blob/main/tiny-Q4_K_M.gguf", ["tiny-Q4_K_M.gguf"]),
        (
            f"https://huggingface.co/{NAME}/resolve/main/UD/tiny-UD-Q2_K_XL.gguf?download=true",
            ["UD/tiny-UD-Q2_K_XL.gguf"],
        ),
        (f"https://huggingface.co/{NAME}/tree/main", ["tiny-Q4_K_M.gguf"]),
        (f"https://huggingface.co/{NAME}/tree/main/UD", ["UD/tiny-UD-Q2_K_XL.gguf"]),
        (f"huggingface.co/{NAME}/tree/main/", ["tiny-Q4_K_M.gguf"]),
        (f"{NAME}@v1.0", ["tiny-Q4_K_M.gguf"]),
        (f"{NAME}@v1.0:UD-Q4_K_M", ["tiny-UD-Q4_K_M.gguf"]),
        (f"{NAME}@refs/pr/1:tiny-UD-Q4_K_M.gguf", ["tiny-UD-Q4_K_M.gguf"]),
        (f"https://hf.co/{NAME}/blob/refs%2Fpr%2F1/tiny-Q4_K_M.gguf", ["tiny-Q4_K_M.gguf"]),
    ],
)
def test_a_gguf_is_fetched_by_its_type_and_found_again_without_the_hub(
    files, monkeypatch, name, wanted
):
    from huggingface_hub import constants

    path = hub.find_source(Path(name))
    assert sorted(FakeHub.asked) == wanted
    revision = "v1.0" if "v1.0" in name else "refs/pr/1" if "refs" in name else "main"
    assert FakeHub.revisions & {"v1.0", "refs/pr/1"} == {revision} - {"main"}
    assert path.as_posix().endswith(f"{COMMIT}/{wanted[0]}")
    assert [(path.parent / Path(each).name).read_bytes() for each in wanted] == [
        files[each] for each in wanted
    ]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.find_source(Path(name)) == path


PIECES = [
    "x.Q2_K.gguf",
    "x.Q8_0.gguf.part1of2",
    "x.Q8_0.gguf.part2of2",
    "y.gguf-split-a",
    "y.gguf-split-b",
]


@pytest.mark.parametrize(
    "kind, names, words",
    [
        (
            ":Q3_K",
            None,
            "no GGUF of type Q3_K; it has tiny-UD-Q2_K_XL, tiny-Q4_K_M, tiny-Q8_0, tiny-UD-Q4_K_M:",
        ),
        ("", ["a-Q8_0.gguf", "b-Q6_K.gguf"], "no GGUF of type Q4_K_M; it has a-Q8_0, b-Q6_K:"),
        (
            ":Q8_0",
            ["a-Q8_0.gguf", "b-Q8_0.gguf"],
            "several GGUFs; it has a-Q8_0, b-Q8_0: give a type or a file after a colon,"
            f" {NAME}:a-Q8_0.gguf",
        ),
        ("", ["d/a-Q4_K_M.gguf", "e/a-Q4_K_M.gguf"], f"after a colon, {NAME}:d/a-Q4_K_M.gguf"),
        (
            "@v1:c.gguf",
            ["a-Q8_0.gguf"],
            f"no c.gguf; it has a-Q8_0: give a type or a file after a colon, {NAME}@v1:a-Q8_0.gguf",
        ),
        (
            "",
            PIECES,
            "no GGUF of type Q4_K_M; it has x.Q2_K: give a type or a file after a colon,"
            f" {NAME}:x.Q2_K.gguf; cut into pieces that have to be joined first: x.Q8_0, y",
        ),
        (
            ":Q8_0",
            PIECES,
            "cut into 2 pieces (x.Q8_0.gguf.part1of2, x.Q8_0.gguf.part2of2); download them,"
            " join them in this order (cat PIECES > x.Q8_0.gguf), and give the path of x.Q8_0.gguf",
        ),
        (":x.Q8_0.gguf.part2of2", PIECES, "cut into 2 pieces (x.Q8_0.gguf.part1of2, "),
        (
            ":y.gguf-split-b",
            PIECES,
            "cut into 2 pieces (y.gguf-split-a, y.gguf-split-b); download them",
        ),
        ("", PIECES[1:], "no GGUF; cut into pieces that have to be joined first: x.Q8_0, y"),
        (":Q8_0", ["README.md"], "there is no GGUF"),
    ],
)
def test_a_type_that_is_not_there_is_refused_in_one_line(files, monkeypatch, kind, names, words):
    if names is not None:
        monkeypatch.setattr(FakeHub, "files", dict.fromkeys(names, b""))
    with pytest.raises(HotsplitError, match="on the hub") as caught:
        hub.find_source(Path(NAME + kind))
    assert words in str(caught.value)
    assert not FakeHub.asked


def test_a_file_that_a_refusal_names_can_be_given(files, monkeypatch):
    monkeypatch.setattr(FakeHub, "files", {f"{d}/a-Q4_K_M.gguf": d.encode() for d in "de"})
    with pytest.raises(HotsplitError) as caught:
        hub.find_source(Path(NAME))
    named = str(caught.value).rpartition("after a colon, ")[2]
    assert hub.find_source(Path(named)).read_bytes() == b"d"


@pytest.mark.parametrize(
    "name, line",
    [
        (f"{NAME}@missing", "refuses it ("),
        ("https://example.org/a/x.gguf", "https://example.org/a/x.gguf: not an address of the hub"),
        (f"https://huggingface.co/{NAME}/discussions/1", "not an address of the hub"),
        ("none/tiny.gguf", "none/tiny.gguf: no such"),
        ("some/where/tiny.gguf", "some/where/tiny.gguf: no such"),
    ],
)
def test_what_is_no_name_on_the_hub_is_refused_in_one_line(files, capsys, tmp_path, name, line):
    for words in (
        ["convert", name, "-o", str(tmp_path / "o.gguf")],
        ["run", name, "-p", "a"],
        ["generate", name, "-p", "a"],
        ["plan", name],
    ):
        assert main(words) == 1
        (shown,) = capsys.readouterr().err.splitlines()
        assert line in shown, words


def test_the_name_of_a_file_is_not_looked_for_on_the_hub(files, capsys):
    assert main(["run", "none/tiny.gguf", "-p", "the"]) == 1
    assert "none/tiny.gguf: no such folder or file" in capsys.readouterr().err


def test_the_only_gguf_needs_no_type_and_is_run(files, tmp_path, monkeypatch, capsys):
    keys, vocab_size = byte_level_keys()
    make_model(sizes=make_sizes(vocab_size=vocab_size), kind="q8_0", extra_keys=keys).save(
        tmp_path / "m.gguf"
    )
    monkeypatch.setattr(FakeHub, "files", {"m.gguf": (tmp_path / "m.gguf").read_bytes()})
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "kept"))
    asked = ("-p", "the", "-n", "3", "--temp", "0", "-t", "1", "--json", "--mode", "exact")
    texts = []
    for model in (
        [NAME],
        ["-hf", NAME],
        ["-hf", f"{NAME}:Q2_K", "-hff", "m.gguf"],
        [f"{NAME}:m.gguf"],
        ["-mu", f"https://huggingface.co/{NAME}/resolve/main/m.gguf"],
        ["m.gguf"],
    ):
        assert main(["generate", *model, *asked]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert len(set(texts)) == 1


def report_of_plan(capsys, source: object) -> dict:
    assert main(["plan", str(source), "--machine", "rtx-4060-8gb", "--vram", "0", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_reads_only_the_header_of_a_gguf(files, tmp_path, monkeypatch, capsys):
    """And the factors of its rotary embeddings; the headers are longer than a part at first."""
    monkeypatch.setattr(hub_headers, "GGUF_BYTES", 2048)
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "kept"))
    header = dataclasses.replace(HEADERS[0], sizes=(2, *HEADERS[0].sizes[1:]))
    first = write_parts(tmp_path, header, 2)
    monkeypatch.setattr(FakeHub, "files", {part.name: Sparse(part) for part in part_paths(first)})
    there, here = (report_of_plan(capsys, each) for each in (f"{NAME}:Q4_K_M", first))
    other = report_of_plan(capsys, f"{NAME}@v2:{first.name}")
    assert other["token_s"] == here["token_s"] and "v2" in FakeHub.revisions
    monkeypatch.setattr(FakeHub, "num_bytes", FakeHub.num_bytes // 2)
    size = sum(part.stat().st_size for part in part_paths(first))
    assert there["download_bytes"] == size and FakeHub.num_bytes < 40_000 and not FakeHub.asked
    same = ("token_s", "cpu_bytes", "reasons", "outtype", "layer_split")
    assert [there[key] for key in same] == [here[key] for key in same]
    assert there["next"] == f"hotsplit run {NAME}:Q4_K_M --vram 0" and not here["download_bytes"]
    monkeypatch.setattr(FakeHub, "sends_parts", False)
    assert main(["plan", f"{NAME}:Q4_K_M", "--machine", "rtx-4060-8gb"]) == 1
    assert f"sends no part of {first.name}" in capsys.readouterr().err.splitlines()[-1]


def test_a_plan_of_a_checkpoint_reads_its_descriptions_and_headers(
    files, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(hub_headers, "SHARD_BYTES", 64)
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "kept"))
    folder = random_llama(tmp_path / "silu", hidden_act="silu")
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setattr(FakeHub, "files", found)
    there, here = (report_of_plan(capsys, each) for each in (NAME, folder))
    assert "model.safetensors" not in FakeHub.asked and "config.json" in FakeHub.asked
    assert there["download_bytes"] == len(found["model.safetensors"])
    assert FakeHub.num_bytes < there["download_bytes"] / 10
    same = ("token_s", "cpu_bytes", "reasons", "outtype")
    assert [there[key] for key in same] == [here[key] for key in same]
    monkeypatch.setattr(FakeHub, "files", {"config.json": b"{}", "pytorch_model.bin": b""})
    assert main(["plan", NAME, "--machine", "rtx-4060-8gb"]) == 1
    assert "are pickles, which have no header" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["GPTQ 4, zero points", "nvfp4, compressed-tensors"])
def test_a_plan_of_a_packed_checkpoint_is_that_of_its_folder(
    files, tmp_path, monkeypatch, capsys, name
):
    """The hub serves only the headers of files, so scales and groups read as zeros."""
    monkeypatch.setenv("HOTSPLIT_CACHE", str(tmp_path / "kept"))
    sizes = {"num_hidden_layers": 2, "intermediate_size": 192}
    dense = random_llama(tmp_path / "silu", hidden_act="silu", **sizes)
    folder, _ = packed_folder(dense, tmp_path, LAYOUTS[name])
    monkeypatch.setattr(FakeHub, "files", {f.name: f.read_bytes() for f in folder.iterdir()})
    there, here = (report_of_plan(capsys, each) for each in (NAME, folder))
    assert "model.safetensors" not in FakeHub.asked
    same = ("token_s", "cpu_bytes", "reasons", "outtype")
    assert [there[key] for key in same] == [here[key] for key in same]
    assert there["outtype"] == LAYOUTS[name].kind


def with_tensor(path: Path, name: str, shape: tuple[int, ...]) -> Path:
    """The header of a file with one more tensor, of nothing but zeros, as a sparse file."""
    keys, tensors = read_gguf(path, "model")
    own = {name: value for name, value in keys.items() if name != "general.architecture"}
    entry = TensorEntry(shape=shape, kind="f32", read_rows=lambda start, stop: np.zeros(0))
    gguf_file._write_header(path, keys["general.architecture"], own, tensors | {name: entry})
    os.truncate(
        path,
        path.stat().st_size
        + 64
        + sum(e.num_bytes + 32 for e in tensors.values())
        + entry.num_bytes,
    )
    return path


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"]
)
def test_a_plan_fetches_no_factors_beyond_what_they_can_be(
    files, tmp_path, monkeypatch, capsys, name
):
    model = make_model(sizes=make_sizes(), kind="q8_0")
    model.save(tmp_path / "m.gguf")
    path = with_tensor(tmp_path / "m.gguf", name, (150_000_000,))
    monkeypatch.setattr(FakeHub, "files", {"m.gguf": Sparse(path)})
    assert main(["plan", NAME, "--machine", "rtx-4060-8gb"]) == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "rope_f" in line and FakeHub.num_bytes < 2 * hub_headers.GGUF_BYTES


def test_the_headers_of_a_model_are_bounded_together(files, tmp_path, monkeypatch, capsys):
    """Each shard claims the longest header that one may have."""
    monkeypatch.setattr(hub_headers, "MOST_SHARD_BYTES", 1 << 20)
    monkeypatch.setattr(
        hub_headers._Parts, "__init__", partialmethod(hub_headers._Parts.__init__, num_left=4 << 20)
    )
    shard = (1 << 19).to_bytes(8, "little") + b" " * (1 << 19)
    names = [f"model-{number:05d}-of-00064.safetensors" for number in range(1, 65)]
    monkeypatch.setattr(FakeHub, "files", {"config.json": b"{}"} | dict.fromkeys(names, shard))
    assert main(["plan", NAME, "--machine", "rtx-4060-8gb"]) == 1
    assert "the headers of its files take more than" in capsys.readouterr().err.splitlines()[-1]
    assert FakeHub.num_bytes <= 4 << 20


def test_a_hub_that_sends_more_than_a_part_is_not_listened_to(files, tmp_path, monkeypatch, capsys):
    class Long(bytes):
        def __getitem__(self, part):
            return bytes(self)

    monkeypatch.setattr(FakeHub, "files", {"m.gguf": Long(5 << 20)})
    assert main(["plan", NAME, "--machine", "rtx-4060-8gb"]) == 1
    assert "sends more than the part of m.gguf" in capsys.readouterr().err.splitlines()[-1]

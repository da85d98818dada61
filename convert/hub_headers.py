"""The headers of a model on the hub, without its weights.

The weights' files are sparse ones of the size of the originals, in which only the header is there:
what reads a model without its weights reads them like any other. Headers come by range requests, of
at most MOST_BYTES for all files of a model, whatever the hub or a file claims; files that are in
the hub's cache already are linked."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock

from hotsplit.convert.hub import Named, fetched, files_of, hub_errors
from hotsplit.errors import HotsplitError
from hotsplit.files.gguf_reader import MAX_HEADER_BYTES, TensorInfo, header_reach, read_header
from hotsplit.files.mapped_files import map_whole
from hotsplit.model.rope import FREQUENCIES, LONG, SHORT

# Most headers of a checkpoint's shards fit into the first; the vocabulary of a GGUF takes 2 to 16
# MiB.
SHARD_BYTES, GGUF_BYTES = 128 << 10, 1 << 20
MOST_SHARD_BYTES = 100 << 20  # of a header in safetensors' own reader
# Of all headers of a model: those of the largest, with 163 shards, take 20 MiB.
MOST_BYTES = 256 << 20
MOST_FACTOR_BYTES = 64 << 10  # of a tensor of rotary factors, a number for two values of a head
AT_A_TIME = 8
_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")


@dataclass(frozen=True, kw_only=True)
class Headers:
    """A model of headers: its place, the bytes of its weights that are still to be downloaded."""

    path: Path
    num_bytes: int


def headers_of(given: Named, folder: Path) -> Headers:
    """The headers of a model on the hub, in an empty folder. Raises HotsplitError like
    `find_source`, for weights that are pickles, and for a hub that sends no parts of files."""
    with hub_errors(given.name):
        files = files_of(given)
        if not files.is_gguf:
            if not files.weights or files.weights[0].endswith(".bin"):
                what = "pickles, which have no header" if files.weights else "none that can be read"
                raise HotsplitError(
                    f"{given.name}: its weights on the hub are {what}; wanted safetensors or a GGUF"
                )
            described = fetched(given, files, has_weights=False)
            for file in filter(Path.is_file, described.rglob("*")):
                _link(folder / file.relative_to(described), file)
        parts = _Parts(given)
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            sizes = list(pool.map(partial(_place, parts, folder), files.weights))
    return Headers(path=files.place(folder), num_bytes=sum(sizes))


def _link(path: Path, file: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(file.resolve())


@dataclass
class _Parts:
    """Fetches parts of the files of a repository, up to MOST_BYTES in all."""

    given: Named
    num_left: int = MOST_BYTES
    lock: Lock = field(default_factory=Lock)

    def fetch(self, file: str, start: int, stop: int) -> tuple[bytes, int]:
        """Bytes start .. stop-1 of a file on the hub, fewer at its end, and its size."""
        from huggingface_hub import constants, get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        with self.lock:
            self.num_left -= stop - start
            if self.num_left < 0:
                raise HotsplitError(
                    f"{self.given.name}: the headers of its files take more than {MOST_BYTES >> 20}"
                    " MiB; download the model and plan from its path"
                )
        asked = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        headers, data = build_hf_headers() | asked, bytearray()
        url = hf_hub_url(self.given.name, file, revision=self.given.revision)
        with get_session().stream("GET", url, headers=headers) as answer:
            hf_raise_for_status(answer)
            found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if answer.status_code != 206 or found is None:
                raise HotsplitError(
                    f"{self.given.name}: {constants.ENDPOINT} sends no part of {file}, so its"
                    " header cannot be read alone; download the model and plan from its path"
                )
            for piece in answer.iter_raw():
                data += piece
                if len(data) > stop - start:
                    raise HotsplitError(
                        f"{self.given.name}: {constants.ENDPOINT} sends more than the part of"
                        f" {file} that was asked for; download the model and plan from its path"
                    )
            return bytes(data), int(found[1])


def _place(parts: _Parts, folder: Path, file: str) -> int:
    """Puts a file's header, or a link to the whole, in its place; returns the missing bytes."""
    from huggingface_hub import try_to_load_from_cache

    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    given = parts.given
    if isinstance(cached := try_to_load_from_cache(given.name, file, revision=given.revision), str):
        path.unlink(missing_ok=True)
        _link(path, Path(cached))
        return 0
    is_gguf = file.endswith(".gguf")
    data, total = parts.fetch(file, 0, GGUF_BYTES if is_gguf else SHARD_BYTES)
    most = min(total, MAX_HEADER_BYTES if is_gguf else MOST_SHARD_BYTES)
    while True:
        with path.open("wb") as written:
            written.write(data)
            written.truncate(total)
        wanted = 8 + int.from_bytes(data[:8], "little")
        if is_gguf:
            with path.open("rb") as stream, map_whole(stream) as whole:
                wanted = header_reach(whole)
        if len(data) >= min(wanted, most):
            break
        more = min(most, 2 * len(data)) if is_gguf else min(most, wanted)
        data += parts.fetch(file, len(data), more)[0]
    if is_gguf:
        _add_factors(parts, path, file)
    return total


def _add_factors(parts: _Parts, path: Path, file: str) -> None:
    factors: list[TensorInfo] = []
    with path.open("rb") as stream, map_whole(stream) as whole, suppress(HotsplitError):
        _, _, tensors = read_header(path, "model file (GGUF)", whole)
        factors = [tensors[name] for name in (FREQUENCIES, SHORT, LONG) if name in tensors]
    with path.open("r+b") as written:
        for info in factors:
            if info.num_bytes <= MOST_FACTOR_BYTES:
                written.seek(info.start)
                written.write(parts.fetch(file, info.start, info.start + info.num_bytes)[0])

"""Finds the folder of a checkpoint named as on the Hugging Face hub: downloaded, or cached.

Only data is fetched, no Python file."""

import re
import sys
from pathlib import Path
from typing import NoReturn

from hotsplit.convert.chat_templates import OTHERS
from hotsplit.errors import HotsplitError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Configs, tokenizers (including SentencePiece's), chat templates, and indices of shards.
DESCRIPTIONS = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
SAFETENSORS = ["model.safetensors", "model-*.safetensors"]
PICKLED = ["pytorch_model.bin", "pytorch_model-*.bin"]
# Files in folders other than that of further chat templates. The hub's patterns cannot exclude a
# name, so these match the names that differ from it in a letter, are shorter, or are longer.
IN_FOLDERS = [
    *(f"{OTHERS[:i]}[!{letter}]*/*" for i, letter in enumerate(OTHERS)),
    *(f"{OTHERS[:i]}/*" for i in range(1, len(OTHERS))),
    f"{OTHERS}?*/*",
]


def find_folder(source: Path) -> Path:
    """`source` itself if it exists, if its parent folder does, or if it is not of the form
    `org/name`; otherwise the folder in the hub's usual cache, with missing files downloaded.

    Raises HotsplitError if files are missing there and cannot be downloaded."""
    name = source.as_posix()
    # models/llama beside a folder `models` is a mistyped path rather than an organisation.
    if source.exists() or source.parent.is_dir() or not HUB_NAME.fullmatch(name):
        return source
    return _download(name)


def _download(name: str) -> Path:
    # Slow to import, and not needed for folders.
    from huggingface_hub import constants, get_session, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # A broken connection raises the error of the HTTP library, which differs between versions of
    # the hub's client (httpx, httpx2); in both its base class is HTTPError.
    library = sys.modules[type(get_session()).__module__.partition(".")[0]]

    def fetch(patterns: list[str]) -> Path:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=IN_FOLDERS))

    try:
        folder = fetch([*DESCRIPTIONS, *SAFETENSORS])
        if not any(folder.glob("model*.safetensors")):
            folder = fetch([*DESCRIPTIONS, *PICKLED])
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            tried = f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} has no copy"
        elif isinstance(error.__cause__, HfHubHTTPError):
            reason = str(error.__cause__).strip().splitlines()[0][:160]
            tried = f"{constants.ENDPOINT} answers with an error ({reason})"
        else:
            tried = (
                f"no list of its files came from {constants.ENDPOINT}, and"
                f" {constants.HF_HUB_CACHE} has no copy"
            )
        _refuse(name, tried, "download it elsewhere and give its folder", error)
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[-1][:160]
        next_step = "check the name, and HF_TOKEN if the model is private or gated"
        _refuse(name, f"{constants.ENDPOINT} refuses it ({reason})", next_step, error)
    except (OSError, ValueError, library.HTTPError) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else "no reason"
        _refuse(name, f"cannot be downloaded ({reason})", "give the folder of a copy", error)
    return folder


def _refuse(name: str, what: str, next_step: str, error: Exception) -> NoReturn:
    raise HotsplitError(
        f"{name}: no such folder; as a name on the hub: {what}; {next_step}"
    ) from error

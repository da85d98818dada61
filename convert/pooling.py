"""How a checkpoint's hidden states become one vector: sentence-transformers' files beside it."""

from pathlib import Path

from hotsplit.files.json_file import read_object, read_text
from hotsplit.model.spec import Pooling

FILE = Path("1_Pooling", "config.json")
# What sentence_transformers/models/Pooling.py calls them. A mean over the root of the length
# differs from the mean by its length only, and vectors get length 1.
_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, Pooling] = {
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean",
    "cls": "cls",
    "lasttoken": "last",
}


def pooling_of(folder: Path) -> tuple[Pooling | None, list[str]]:
    """(the pooling; None if the folder does not say or it is not supported, notes). Raises
    HotsplitError for a broken file."""
    path = folder / FILE
    if not path.is_file():
        return None, []
    values = read_object(path, "pooling")
    given = [name for name, value in values.items() if name.startswith("pooling_mode_") and value]
    known = {_MODES.get(name) for name in given}
    if isinstance(name := values.get("pooling_mode"), str):  # newer files have one name
        given, known = [name], {_NAMES.get(name)}
    pooling = next(iter(known)) if len(known) == 1 else None
    notes = []
    if pooling is None:
        notes.append(
            f"{path}: pooling by {' and '.join(given) or 'nothing'} is not supported: the"
            " server's embeddings will be means"
        )
    modules = folder / "modules.json"
    if modules.is_file() and ".Dense" in read_text(modules, "modules"):
        notes.append(
            f"{modules}: a layer Dense follows the pooling, which is left out: the server's"
            " embeddings are those before it"
        )
    return pooling, notes

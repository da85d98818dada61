"""Merges profiles of one model: adds counts and histogram bins."""

from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from pathlib import Path

from hotsplit.artifacts.profile_file import Corpus, Profile
from hotsplit.errors import HotsplitError
from hotsplit.files.outputs import check_output


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    profiles: tuple[Path, ...]
    output: Path
    force: bool = False

    def __post_init__(self) -> None:
        if len(self.profiles) < 2:
            found = "one profile" if self.profiles else "no profiles"
            raise HotsplitError(f"{found} to merge, wanted two or more")


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    output: Path
    model_id: str
    num_tokens: int
    density_L: tuple[float, ...]
    corpora: tuple[Corpus, ...]
    notes: tuple[str, ...]


def merge(config: MergeConfig) -> MergeReport:
    """Writes the sum of the profiles. Raises HotsplitError for profiles of different models, sizes
    or thresholds, and, unless `force`, if two have a text in common: a profile does not record
    which parts of a text it counted, so both may have counted the same ones."""
    check_output(config.output, force=config.force, inputs=config.profiles)
    loaded = [(path, Profile.load(path)) for path in config.profiles]
    notes = []
    for (path_a, a), (path_b, b) in combinations(loaded, 2):
        pair = f"{path_a} and {path_b}"
        if a.model_id != b.model_id or a.active_count_LF.shape != b.active_count_LF.shape:
            raise HotsplitError(
                f"{pair}: profiles of two models ({a.model_id[:12]}, {b.model_id[:12]});"
                " only those of one model add up"
            )
        for layer, thresholds in enumerate(zip(a.threshold_L, b.threshold_L, strict=True)):
            if thresholds[0] != thresholds[1]:
                raise HotsplitError(
                    f"{pair}: layer {layer} was counted above {thresholds[0]:.6g} and above"
                    f" {thresholds[1]:.6g}; profile again with one threshold"
                )
        shared = {c.sha256 for c in a.corpora} & {c.sha256 for c in b.corpora}
        if shared:
            name = next(c.name for c in a.corpora if c.sha256 in shared)
            line = f"{path_a} and {path_b} both count {name}; parts of it may be counted twice"
            if not config.force:
                raise HotsplitError(f"{line}; leave one out, or add them anyway with --force")
            notes.append(line)
    result = reduce(Profile.merge, (profile for _, profile in loaded))
    result.save(config.output)
    return MergeReport(
        output=config.output,
        model_id=result.model_id,
        num_tokens=result.num_tokens,
        density_L=tuple(result.density_L[result.has_neurons_L].tolist()),
        corpora=result.corpora,
        notes=tuple(notes),
    )

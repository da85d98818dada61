"""The modes of a run, the user's words for two things that the rest of the code keeps apart: who
names the neurons that a token computes, and whether neurons that stay silent are skipped.

    mode         neurons are named by    silent neurons
    dense        nobody: all             are computed
    exact        nobody: all             are skipped, after their gate
    predicted    the predictor           are skipped, after their gate

Code that runs a layer asks the layer: its spec has a block that names neurons, or none, and its
gate knows whether silent neurons are computed."""

from typing import Literal, get_args

Mode = Literal["dense", "exact", "predicted"]
MODES: tuple[Mode, ...] = get_args(Mode)


def runs_predictors(mode: Mode) -> bool:
    """True if predictors, which a file may have, name the neurons."""
    return mode == "predicted"


def computes_all(mode: Mode) -> bool:
    """True if silent neurons are computed too."""
    return mode == "dense"

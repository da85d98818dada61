"""File names as they appear on the page, and the commands that make missing files."""

import shlex

from hotsplit.report.page import Missing
from hotsplit.report.report_config import ReportConfig

PROFILE, MACHINE, PLAN = "model.profile.safetensors", "machine.json", "model.split.gguf"


class Names:
    """The names of the given files, without folders. Files that are not given have default names,
    except a plan, whose name is then ""."""

    def __init__(self, config: ReportConfig, *, has_experts: bool) -> None:
        self.model = shlex.quote(config.model.name)
        self.profile = shlex.quote(config.profile.name) if config.profile else PROFILE
        self.machine = shlex.quote(config.machine.name) if config.machine else MACHINE
        self.split = shlex.quote(config.split.name) if config.split else ""
        profile = f"hotsplit profile {self.model} --corpus text.txt -o {PROFILE}"
        self.no_profile = _missing("profile", "--profile", "makes", profile)
        calibrate = f"hotsplit calibrate -o {MACHINE}"
        self.no_machine = _missing("machine", "--machine", "measures", calibrate)
        self.new_machine = f"hotsplit calibrate --gpu-from card.json -o {MACHINE}"
        solve = (
            f"hotsplit solve {self.model} --profile {self.profile} --machine {self.machine}"
            f" --vram-budget 8GiB -o {PLAN}"
        )
        self.no_split = _missing("plan", "--split", "makes", solve)
        plan = f" --split {self.split}" if self.split else ""
        compare = f"hotsplit eval {self.model}{plan} --corpus held-out.txt --json > eval.json"
        self.no_eval = _missing("comparison", "--eval-json", "makes", compare)
        self.no_predictors = Missing(
            "The predictors' recall is in the .report.json next to a profile (--profile); this"
            " writes both:",
            f"{profile} --train-predictors predictors",
        )
        if has_experts:
            self.no_predictors = Missing("A mixture of experts has routers instead of predictors.")


def _missing(what: str, option: str, does: str, command: str) -> Missing:
    return Missing(f"No {what} was given ({option}); this {does} one:", command)

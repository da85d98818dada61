"""File names as they appear on the page, and the commands that make missing files."""

import shlex

from hotsplit.report.config import ReportConfig
from hotsplit.report.page import Missing

PROFILE, MACHINE, PLAN = "model.profile.safetensors", "machine.json", "model.split.gguf"


class Names:
    """The names of the given files, without folders. Files that are not given have default names,
    except a plan, whose name is then ""."""

    def __init__(self, config: ReportConfig) -> None:
        self.model = shlex.quote(config.model.name)
        self.profile = shlex.quote(config.profile.name) if config.profile else PROFILE
        self.machine = shlex.quote(config.machine.name) if config.machine else MACHINE
        self.split = shlex.quote(config.split.name) if config.split else ""

    @property
    def no_profile(self) -> Missing:
        command = f"hotsplit profile {self.model} --corpus text.txt -o {PROFILE}"
        return Missing(line="No profile was given (--profile); this makes one:", command=command)

    @property
    def no_machine(self) -> Missing:
        command = f"hotsplit calibrate -o {MACHINE}"
        return Missing(line="No machine was given (--machine); this measures one:", command=command)

    @property
    def new_machine(self) -> str:
        return f"hotsplit calibrate --gpu-from card.json -o {MACHINE}"

    @property
    def no_split(self) -> Missing:
        command = (
            f"hotsplit solve {self.model} --profile {self.profile} --machine {self.machine}"
            f" --vram-budget 8GiB -o {PLAN}"
        )
        return Missing(line="No plan was given (--split); this makes one:", command=command)

    @property
    def no_predictors(self) -> Missing:
        command = (
            f"hotsplit profile {self.model} --corpus text.txt -o {PROFILE}"
            " --train-predictors predictors"
        )
        return Missing(
            line="The predictors' recall is in the .report.json next to a profile (--profile); this"
            " writes both:",
            command=command,
        )

    @property
    def no_eval(self) -> Missing:
        plan = f" --split {self.split}" if self.split else ""
        command = f"hotsplit eval {self.model}{plan} --corpus held-out.txt --json > eval.json"
        return Missing(
            line="No comparison was given (--eval-json); this makes one:", command=command
        )

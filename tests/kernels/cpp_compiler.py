"""Compiles C++ for tests. If ccache is installed, a source is compiled only after a change of what
it includes, in this checkout or another."""

import os
import shutil
import subprocess
from pathlib import Path

from paths import ROOT

KERNELS = ROOT / "runtime" / "kernels" / "cpu"
# With sanitizers, -Og compiles in 17 s what takes 30 s with -O1.
FLAGS = ["-std=c++17", "-Og", "-w", "-ffp-contract=off"]
COMPILER = ["ccache", "g++"] if shutil.which("ccache") else ["g++"]


def compiled(source: Path, output: Path, *flags: str | Path) -> Path:
    """Returns `output`, the object file; raises CalledProcessError after an error."""
    command = [*COMPILER, *FLAGS, *flags, "-c", source, "-o", output]
    # ccache makes paths below this folder relative to the current one: another checkout has them
    # too.
    environment = {**os.environ, "CCACHE_BASEDIR": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    return output

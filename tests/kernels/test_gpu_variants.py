"""The kernels of a 7B plan have few variants, which compile in seconds. No device is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SEARCH_PATH

SCRIPT = Path(__file__).with_name("gpu_variants.py")
MOST_VARIANTS, MOST_PROGRAMS = 40, 36
MOST_SECONDS = 60.0  # of one core; about 8 were measured


@pytest.mark.slow
@pytest.mark.parametrize("arch, kind", [(89, "q4_0"), (90, "f16")])
def test_a_plan_has_few_variants_and_compiles_in_seconds(arch, kind):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = SEARCH_PATH
    command = [sys.executable, SCRIPT, str(arch), kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    *each, total = [json.loads(line) for line in done.stdout.splitlines()]
    assert total["variants"] == len({record["variant"] for record in each}) <= MOST_VARIANTS
    assert 10 <= total["programs"] <= MOST_PROGRAMS
    assert total["seconds"] < MOST_SECONDS

"""The folders at the root become one package and hide no standard module."""

import subprocess
import sys
import tomllib

import pytest
from paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]  # import path: folder
FOLDERS = [folder for path, folder in PACKAGES.items() if path != "hotsplit"]
IMPORTS = """
import profile, cProfile
profile.Profile, cProfile.Profile
import torch
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
import hotsplit.measure.calibrate.calibrate, hotsplit.solver.solve
from hotsplit import Engine
Engine.load
"""


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_no_init_file(folder):
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists(), "it would hide a module of the same name"


@pytest.mark.parametrize("cwd", [ROOT, "/"])
def test_the_program_runs_in_any_folder(cwd):
    subprocess.run([sys.executable, "-m", "hotsplit", "--version"], cwd=cwd, check=True)


def test_standard_modules_are_found_beside_our_folders():
    subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, check=True)


def test_no_folder_is_importable_by_its_bare_name(tmp_path):
    for name in set(FOLDERS) - sys.stdlib_module_names:
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"], cwd=tmp_path, check=False, capture_output=True
        )
        assert done.returncode != 0, f"{name} is importable by that bare name"


def test_importing_the_package_needs_no_torch():
    probe = "import sys, hotsplit, hotsplit.artifacts.split_file; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True)

"""Where the tests and the tree lie."""

import os
import tomllib
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
_OPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
# PYTHONPATH for a test's process that imports modules of the tests.
SEARCH_PATH = os.pathsep.join(str(ROOT / folder) for folder in _OPTIONS["pythonpath"])

"""llama.cpp as an oracle: `make test-llamacpp` builds it into build/llamacpp-venv and runs these
tests."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / "build/llamacpp-venv/bin/python"


@pytest.fixture(scope="session")
def llama_cpp() -> Callable[..., dict]:
    """Asks oracle.py: llama_cpp("tokenize", model=..., ...) returns its answer."""
    assert PYTHON.exists(), "llama.cpp is not built; run make test-llamacpp"

    def ask(action: str, **request: object) -> dict:
        command, given = [PYTHON, Path(__file__).parent / "oracle.py"], {"do": action, **request}
        options = {"input": json.dumps(given, default=str), "text": True, "timeout": 300}
        done = subprocess.run(command, capture_output=True, **options)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return ask

"""Wrong options are refused before torch is imported, which takes seconds on a busy machine."""

import json

import pytest
from forked import run_python

PROGRAM = """
import json, sys
from hotsplit.cli import main
code = main(json.loads(sys.argv[1]))
print(json.dumps([code, "torch" in sys.modules]))
"""


def ended(words: str, cwd) -> tuple[int, bool, list[str]]:
    """(exit code, whether torch was imported, lines on stderr) of a command in a process that has
    imported the command line."""
    done = run_python(PROGRAM, json.dumps(words.split()), cwd=cwd, server="cli")
    assert done.returncode == 0, done.stderr
    code, has_torch = json.loads(done.stdout.splitlines()[-1])
    return code, has_torch, done.stderr.splitlines()


@pytest.mark.parametrize(
    "words, line",
    [
        ("generate m.gguf", "there is no prompt"),
        ("generate m.gguf -p a --top-p 7", "top_p is 7.0, wanted a number from 0 to 1"),
        ("generate m.gguf -p a -n 0", "max_tokens (-n) is 0"),
        ("generate m.gguf -p a -t 0", "--threads is 0"),
        ("generate m.gguf -p a --device x", "device 'x'"),
        ("generate m.gguf -p a --max-loss -1", "max_loss is -1.0"),
        ("generate m.gguf -p a --logprobs 1", "--logprobs goes with --json"),
        ("generate m.gguf -p a --speculate draft", "needs a draft model"),
        ("chat m.gguf --top-p 7", "top_p is 7.0"),
        ("chat m.gguf -n 0", "max_tokens (-n) is 0"),
        ("chat m.gguf --chat-template-kwargs 1", "wanted an object"),
        ("run m.gguf -p a --top-p 7", "top_p is 7.0"),
        ("run m.gguf -p a --regex a --grammar b", "exclude each other"),
        ("serve m.gguf --top-p 7", "top_p is 7.0"),
        ("serve m.gguf --port 99999999", "port is 99999999"),
        ("eval m.gguf --corpus t --tokens 1", "tokens is 1, wanted 2 or more"),
        ("eval m.gguf", "missing option '--corpus'"),
        ("bench m.gguf -r 0", "-r is 0"),
        ("profile m.gguf --corpus t -o p --tokens 0", "tokens is 0"),
        ("convert m.gguf -o x.gguf --activation tanh", "activation 'tanh'"),
    ],
)
def test_a_wrong_option_is_refused_without_torch(tmp_path, words, line):
    code, has_torch, lines = ended(words, tmp_path)
    assert code in (1, 2) and len(lines) == 1 and line in lines[0]
    assert not has_torch


def test_a_command_that_goes_on_imports_torch(tmp_path):
    """The check above can fail."""
    code, has_torch, lines = ended("generate m.gguf -p a", tmp_path)
    assert code == 1 and has_torch and "m.gguf: no such file" in lines[-1]

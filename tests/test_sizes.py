"""Files and functions of the product are short enough to be read at once."""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("src", "convert", "profile", "measure", "solver", "sparsify", "runtime", "serve",
           "report", "run")  # fmt: skip
MOST_LINES = {"file": 400, "function": 60}
LONG = {
    "solver/problem_builder.py:build_problem",  # straight text: one number after the other
    # Kernels.
    "runtime/kernels/cpu/library.py",
    "runtime/kernels/gpu/heads.py:_rotate_append",
    "runtime/kernels/gpu/attention.py:_attend_part",
    "runtime/kernels/gpu/attention.py:attend",
    "runtime/kernels/gpu/delta.py:_convolve",
    "runtime/kernels/gpu/delta.py:_delta_rule",
    "runtime/kernels/gpu/neurons.py:_gate_up",
    "runtime/kernels/gpu/prompt_attention.py:_attend_tokens",
    "runtime/kernels/gpu/routing.py:_choose_experts",
    "runtime/kernels/gpu/neurons.py:_down",
}


def long_places(name: str, source: str) -> Iterable[str]:
    """The file, if it is too long, and its functions that are, with their sizes in lines."""
    num_lines = len(source.splitlines())
    if num_lines > MOST_LINES["file"]:
        yield f"{name} {num_lines}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MOST_LINES["function"]:
                yield f"{name}:{node.name} {num_lines}"


def test_only_the_listed_places_are_long():
    files = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 300
    named = [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in files]
    found = [place for name, source in named for place in long_places(name, source)]
    assert not [place for place in found if place.split()[0] not in LONG], "split them"
    assert not LONG - {place.split()[0] for place in found}, (
        "no longer long: take them off the list"
    )


@pytest.mark.parametrize("more", [0, 1])
def test_a_line_too_many_is_found(more):
    text = "x = 1\n" * (MOST_LINES["file"] + more)
    assert list(long_places("a.py", text)) == [f"a.py {MOST_LINES['file'] + 1}"] * more
    body = "        x = 1\n" * (MOST_LINES["function"] - 1 + more)
    for kind in ("def", "async def"):
        source = f"class A:\n    {kind} f(self):\n{body}"
        assert list(long_places("a.py", source)) == [f"a.py:f {MOST_LINES['function'] + 1}"] * more

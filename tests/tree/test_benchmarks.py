"""Benchmarks are run by hand. What they use of the package must be there, and take the arguments
that they give."""

import ast
import importlib
import inspect

import pytest
from paths import ROOT

SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
MISSING = object()


def wrong_uses(text: str) -> list[str]:
    """Names of the package that a script imports, reads or replaces, and that are not there; and
    calls that its functions and classes would refuse."""
    tree, known, found = ast.parse(text), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hotsplit"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                value = _member(module, alias.name)
                if value is MISSING:
                    found.append(f"line {node.lineno}: {node.module} has no {alias.name}")
                known[alias.asname or alias.name] = value

    def value_of(node: ast.expr) -> object:
        if isinstance(node, ast.Name):
            return known.get(node.id, MISSING)
        is_of_known = isinstance(node, ast.Attribute) and value_of(node.value) is not MISSING
        return getattr(value_of(node.value), node.attr, MISSING) if is_of_known else MISSING

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and inspect.ismodule(owner := value_of(node.value)):
            if not hasattr(owner, node.attr):
                found.append(f"line {node.lineno}: {owner.__name__} has no {node.attr}")
        elif isinstance(node, ast.Call):
            found += [f"line {node.lineno}: {each}" for each in _wrong_call(node, value_of)]
    return found


def _member(module, name: str) -> object:
    if not hasattr(module, name):
        try:
            return importlib.import_module(f"{module.__name__}.{name}")
        except ModuleNotFoundError:
            return MISSING
    return getattr(module, name)


def _wrong_call(call: ast.Call, value_of) -> list[str]:
    words = [each.value for each in call.args if isinstance(each, ast.Constant)]
    names = [each.arg for each in call.keywords]
    is_patch = ast.unparse(call.func).endswith(("patch.object", "patch.multiple", "setattr"))
    if is_patch and call.args and inspect.ismodule(module := value_of(call.args[0])):
        replaced = names if ast.unparse(call.func).endswith("multiple") else words[:1]
        return [f"{module.__name__} has no {n}" for n in replaced if not hasattr(module, n)]
    function = value_of(call.func)
    if function is MISSING or not callable(function) or None in names:
        return []
    if any(isinstance(each, ast.Starred) for each in call.args):
        return []
    try:
        inspect.signature(function).bind(*call.args, **dict.fromkeys(names))
    except TypeError as error:
        return [f"{ast.unparse(call.func)}: {error}"]
    except ValueError:  # has no signature
        return []
    return []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_benchmarks_use_is_there(script):
    assert wrong_uses(script.read_text()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from hotsplit.solver.replay import Side", "has no Side"),
        ("from hotsplit.solver import replay\nreplay.weights(1)", "replay has no weights"),
        ("from hotsplit.solver import replay\npatch.multiple(replay, _row=1)", "has no _row"),
        ("from hotsplit.solver import replay\npatch.object(replay, 'row', 1)", "has no row"),
        ("from hotsplit.solver.replay import relax\nrelax(1, 2, fast=True)", "'fast'"),
        ("from hotsplit.solver.replay import relax\nrelax(1)", "missing a required argument"),
    ],
)
def test_wrong_uses_are_found(text, words):
    (line,) = wrong_uses(text)
    assert words in line

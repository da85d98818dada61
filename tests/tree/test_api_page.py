"""docs/api.md names all that is public, with signatures and defaults, and no other names or
options."""

import dataclasses
import inspect
import re

import pytest
from models import make_model
from paths import ROOT

import hotsplit
from hotsplit.options.engine_config import EngineConfig
from hotsplit.options.generation_options import SamplingOptions, SpeculationOptions
from hotsplit.runtime.engine import Engine
from hotsplit.runtime.generate.chat import ChatOptions, Conversation
from hotsplit.runtime.generate.generation import GenerationOptions, Run, Token
from hotsplit.runtime.ops.observers import NAMES, Observation
from hotsplit.runtime.step.sequences import Part, Sequence

PAGE = (ROOT / "docs" / "api.md").read_text()
LONGEST = 30  # the page repeats defaults whose repr is shorter
# Named by the page without their arguments, or of no use to programs.
UNNAMED = {
    Sequence: {"number", "yields", "owner", "check_room"},
    Conversation: {"answer", "options", "num_dropped"},
    Observation: {"observe", "wants", "registry"},
}
OPTIONS = {
    "Options of an engine": [EngineConfig],
    "Options of sampling": [SamplingOptions],
    "Options of a text": [GenerationOptions, ChatOptions, SpeculationOptions],
}


def section(title: str, page: str = PAGE) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return found


def signature(name: str, function: object) -> str:
    """name(parameters with their defaults), without types."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    text = str(inspect.Signature(parameters))
    return name + text.replace("\\n", "\n")


def members(kind: type, instance: object | None = None) -> list[str]:
    """What the page must contain for a class: signatures of methods, names of values."""
    names = {name for name in dir(kind) if not name.startswith("_")}
    names |= {name for name in vars(instance or object) if not name.startswith("_")}
    if dataclasses.is_dataclass(kind):
        names |= {field.name for field in dataclasses.fields(kind)}
    found = []
    for name in sorted(names - UNNAMED.get(kind, set())):
        value = getattr(kind, name, None)
        is_method = callable(value) and not isinstance(inspect.getattr_static(kind, name), property)
        on_class = isinstance(inspect.getattr_static(kind, name, None), classmethod)
        full = f"{kind.__name__}.{name}" if on_class else name
        found.append(signature(full, value) if is_method else name)
    return found


def missing(wanted: list[str], text: str) -> list[str]:
    return [one for one in wanted if f"`{one}`" not in text]


def options_of(kinds: list[type]) -> list[str]:
    """`name=default` for each field; only `name` if there is no default, or if it is long, made by
    a function, or that of dry_sequence_breakers."""
    found = []
    for field in (field for kind in kinds for field in dataclasses.fields(kind)):
        has_default = field.default is not dataclasses.MISSING
        is_short = has_default and len(repr(field.default)) < LONGEST
        is_named = field.name not in ("dry_sequence_breakers",)
        found.append(f"{field.name}={field.default!r}" if is_short and is_named else field.name)
    return found


def test_all_public_names_are_there_and_no_others():
    rows = re.findall(r"^\| (`.*?) \|", section("Names"), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(hotsplit.__all__)
    for name in hotsplit.__all__:
        assert getattr(hotsplit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = hotsplit.Nothing


@pytest.mark.parametrize("kind", [Token, Run, Sequence, Conversation, Observation])
def test_all_members_of_what_an_engine_returns_are_there(kind):
    (line,) = re.findall(rf"^- `{kind.__name__}`: (.*)$", section("Engine"), re.MULTILINE)
    assert missing(members(kind), line) == []


def test_all_members_of_an_engine_are_there(tmp_path):
    make_model().save(tmp_path / "m.gguf")
    with hotsplit.Engine.load(tmp_path / "m.gguf", device="cpu") as engine:
        wanted = members(Engine, engine)
    assert len(wanted) > 25 and "Engine.load(model, split=None, **options)" in wanted
    assert missing(wanted, section("Engine")) == []
    named = re.findall(r"^- `([\w.]+)\(", section("Engine"), re.MULTILINE)
    assert all(hasattr(Engine, name.removeprefix("Engine.")) for name in named)


@pytest.mark.parametrize("title", OPTIONS)
def test_options_have_the_names_and_defaults_of_the_code(title):
    rows = re.findall(r"^\| `(.*?)` \|", section(title), re.MULTILINE)
    assert rows == options_of(OPTIONS[title])


def test_a_part_and_the_observed_tensors_are_those_of_the_code():
    assert f"`{signature('Part', Part).replace('*, ', '').replace(' -> None', '')}`" in PAGE
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section("Observers"), re.MULTILINE)
    assert dict(rows) == NAMES


def test_the_check_sees_what_is_missing():
    assert missing(["generate(prompt)"], "`generate(prompt, seed=1)`") == ["generate(prompt)"]
    assert "seed=None" in options_of([SamplingOptions]) and "samplers" in options_of(
        [SamplingOptions]
    )
    assert section("A", "## A\none\n## B\ntwo\n") == "one\n"

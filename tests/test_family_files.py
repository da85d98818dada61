"""Families and operations by the files of the product whose code names them: at most six each.

Run as a program, it writes the tables of docs/adding-a-family.md."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

from hotsplit.families.table import ARCHITECTURES, FAMILIES

ROOT = Path(__file__).parent.parent
PRODUCT = ("src", "convert", "profile", "measure", "solver", "sparsify", "runtime", "serve",
           "report", "run")  # fmt: skip
GUIDE = ROOT / "docs" / "adding-a-family.md"
TABLE = "src/hotsplit/families/table.py"
MOST_FILES = 6
# By a family's title, the patterns of what code names it by, whatever the case: its classes of checkpoints,
# llama.cpp's names of its graph, its module and its title, and what no other family uses.
FAMILY_WORDS = {
    "Llama": ("LlamaForCausalLM", r'(?<!", )"llama"', r"llama\.(GRAPH|LLAMA)\b"),  # no tokenizer
    "ProSparse": ("ProSparse", "SparseLlama"),
    "Arcee": ("arcee",),
    "Mistral": (r"\bmistral(?!3)", "MistralForCausalLM", "Mistral3For"),
    "Ministral": ("ministral", "mistral3"),
    "Bamboo": ("bamboo",),
    "Qwen 2": ("Qwen 2(?! MoE)", "qwen2For", '"qwen2"', r"qwen\.QWEN2"),
    "Qwen 3": (r"Qwen 3(?!\.| MoE)", "qwen3For", '"qwen3"', r"qwen\.QWEN3"),
    "OPT": (r"\bOPT\b(?!imi)", "OPTFor", "OPT_NORM", '"opt"'),
    "Falcon": ("falcon", "RWForCausalLM"),
    "Phi-3 and 4-mini": (
        r"\bphi-?3", r"\bphi\b(?!-)", "longrope", "has_contexts", "rope_factors_(short|long)",
    ),
    "Nemotron": ("nemotron",),
    "StarCoder 2": (r"starcoder\b", "starcoder ?2"),
    "Command R": (r"Command R\b", "command_r", "command-r", "CohereFor", r"\bcohere\b"),
    "Cohere 2": (r"Cohere ?2(?!moe)", r"\bcohere\b"),
    "Gemma 2": ("gemma ?2", '"gemma"', r"\bgemma\.", "(?-i:SCORE_CAP)"),
    "Gemma 3": ("gemma ?3(?!n)", '"gemma"', r"\bgemma\."),
    "Gemma 3n": (
        "gemma ?3n", "matrices_apart", "matrices_joined", "rows_of_first", "with_unused",
    ),
    "Gemma 4": (
        "gemma ?4", "proportional", "layer_output_scale", "inputs_of_config", "refuse_without_rows",
    ),
    "SmolLM3": ("smollm",),
    "Mixtral": ("mixtral",),
    "OLMo 2": (r"\bolmo\b", "olmo ?2"),
    "OLMo 3": (r"\bolmo\b", "olmo ?3"),
    "EXAONE 4": (r"exaone\b(?!-)", "exaone ?4"),
    "ERNIE 4.5": (r"\bernie\b", r"ernie ?4\.5", "ernie4_5"),
    "OLMoE": ("olmoe",),
    "Qwen 2 MoE": ("Qwen2Moe", "Qwen 2 MoE", r"mixtures\.QWEN2"),
    "Qwen 3 MoE": ("Qwen3Moe", "Qwen 3 MoE", r"mixtures\.QWEN3"),
    "Granite": (r"granite\b(?!-)", "GraniteFor", "granite(moe)?hybrid"),
    "Granite MoE": ("granite ?moe",),
    "GLM-4.5": (r"glm-4\.5", "glm4_?moe", r"\bglm\."),
    "GLM-4": (r"GLM-4(?!\.)", "glm_dense", "GlmFor", "Glm4For", '"glm4"', r"chatglm\b",
              "gates_apart", "gates_joined"),
    "gpt-oss": ("gpt.?oss",),
    "SmallThinker": ("SmallThinker",),
    "Qwen3-Next": ("qwen3.?next",),
    "Qwen 3.5 and 3.6": (
        r"Qwen 3\.[56]", "qwen3_5(?!_?moe)", "qwen35(?!moe)", "NEGATED_EXP",
    ),
    "Qwen 3.5 and 3.6 MoE": (r"Qwen 3\.5 and 3\.6 MoE", "qwen3_5_?moe", "qwen35moe"),
}  # fmt: skip
# Likewise by an operation's name; the modules of the families that have it do not count.
OPERATION_WORDS = {
    "soft caps of scores (Gemma 2)": ("score_cap",),
    "sinks of attention (gpt-oss)": ("head_sinks", "attn_sinks"),
    "queries that grow with the position (Ministral 3)": (
        "growth_(factor|length)",
        "grow_queries",
        "growth_of",
        r"\.growth\b",
        "temperature_scale",
    ),
    "norms of values without weights (Gemma 3n, 4)": ("norms_values", "norm_values"),
    "norms with weights for each head (Command R+)": (
        "norms_by_head",
        "is_by_head",
        r"norm_stride\b",
    ),
    "ReLU squared, an activation": ("relu2", "ReLU squared"),
    "keys and values of earlier layers (Gemma 3n, 4)": (
        r"num_kv_projections",
        "own_heads",
        "shared_keys",
        r"attention\.source",
        "shared_kv",
        "kv_shared",
    ),
    "gates cut off by their mean and deviation (Gemma 3n)": ("cutoff", "activation_sparsity"),
    "planes of the hidden state (Gemma 3n)": (
        "altup",
        "predict[ _]?planes",
        "correct[ _]?planes",
        "add[ _]?to[ _]?planes",
        "begin[ _]?planes",
        "end[ _]?planes",
        "ofplanes",
        r"model\.planes",
        r"ops\.planes",
    ),
    "a product of low rank (Gemma 3n)": (  # predictors of low rank are others
        "laurel",
        '"low rank"',
        "HsLowRank",
        r"model\.low_rank",
        r"ops\.low_rank",
    ),
    "inputs that layers have of their own (Gemma 3n, Gemma 4)": (
        r"layer[ _]?inputs",
        r"\bPerLayer\b",
        '"per layer"',
        "HsPerLayer",
        '"per_layer"',
        r"per_layer_(token|model|proj|input|out)",
        "inp_gate",
        r"model\.per_layer",
        r"ops\.per_layer",
    ),
    "layer norms without biases (Command R)": ("layer_without_bias",),
    "values that are keys (Gemma 4)": ("values_are_keys", "raw_keys", "num_kv_projections"),
    "a soft cap of logits (Gemma 2)": ("logit_cap",),
    "factors of a sum, which a tensor may have (Granite, Gemma 3n, 4)": (
        r"factors\.(factor|times)\b", "sum_scale", r"op\.(factor|scale)\b", "STRUCT_FIELDS =",
        r"times: float = 1", r"float factor = 1\.0f, scale",
    ),
    "a scale of each expert (Gemma 4)": ("own_scale", r"scale_E\b"),
}  # fmt: skip
_PYTHON = re.compile(
    r'^[ \t]*"""(?:.|\n)*?"""'  # a docstring
    r"""|("{3}(?:.|\n)*?"{3}|'(?:[^'\n\\]|\\.)*'|"(?:[^"\n\\]|\\.)*")|#.*""",
    re.MULTILINE,
)
_IMPORT = re.compile(r"^ *from hotsplit\.([\w.]+) import (\([^)]*\)|.*)", re.MULTILINE)
_CPP = re.compile(r'("(?:[^"\n\\]|\\.)*")|//.*|/\*(?:.|\n)*?\*/')


def without_comments(name: str, text: str) -> str:
    """The code of a file, with strings, but without comments and docstrings."""
    pattern = _PYTHON if name.endswith(".py") else _CPP
    return pattern.sub(lambda found: found[1] or "", text)


@cache
def product() -> dict[str, str]:
    """The code of each file of the product."""
    files = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.*"))]
    named = {p.relative_to(ROOT).as_posix(): p for p in files if p.suffix in (".py", ".cpp", ".h")}
    return {name: without_comments(name, path.read_text()) for name, path in named.items()}


def first_letters(pattern: str) -> str:
    """Letters that every match of a pattern has, in lower case: those that it begins with."""
    found = re.match(r'[\w "-]*', re.sub(r"^(\(\?<!.*?\)|\\b|\(\?-i:)", "", pattern))[0]
    is_last_optional = pattern[pattern.index(found) + len(found) :].startswith("?")
    return found.lower()[:-1] if is_last_optional else found.lower()


@cache
def in_small_letters() -> dict[str, str]:
    return {name: text.lower() for name, text in product().items()}


@cache
def files_with_letters(letters: str) -> list[str]:
    return [name for name, text in in_small_letters().items() if letters in text]


@cache
def files_with(*patterns: str) -> list[str]:
    """The files of the product whose code has one of the words, whatever its case."""
    found = {name for p in patterns for name in files_with_letters(first_letters(p))}
    return having(patterns, {name: product()[name] for name in sorted(found)})


def having(patterns: Iterable[str], code: Mapping[str, str]) -> list[str]:
    words = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
    return [name for name, text in code.items() if any(word.search(text) for word in words)]


def modules_of(title: str) -> set[str]:
    """The files that each family of this title has: its module, and the table."""
    (own,) = files_with(f'title="{re.escape(title)}",')
    return {own, TABLE}


def table_of(head: str, rows: Iterable[tuple[str, list[str], set[str]]]) -> str:
    """A table of (name, files, those that need no mention)."""
    lines = [head, re.sub(r"[^|]+", "---", head)]
    for name, files, known in rows:
        others = ", ".join(f.removeprefix("src/hotsplit/") for f in files if f not in known)
        lines.append(f"| {name} | {len(files)} | {others} |".replace("|  |", "| |"))
    return "\n".join(lines)


def families_table() -> str:
    rows = [(t, files_with(*words), modules_of(t)) for t, words in FAMILY_WORDS.items()]
    return table_of("| family | files | beside its module and families/table.py |", rows)


def files_of_operation(name: str) -> list[str]:
    families = set[str]().union(*map(modules_of, FAMILY_WORDS))
    return [file for file in files_with(*OPERATION_WORDS[name]) if file not in families]


def operations_table() -> str:
    rows = [
        (name, [file.removeprefix("runtime/") for file in files_of_operation(name)], set())
        for name in OPERATION_WORDS
    ]
    return table_of("| operation | files | in runtime/ or src/hotsplit/ |", rows)


TABLES = (families_table, operations_table)


def test_each_is_named_in_at_most_six_files():
    counts = {title: len(files_with(*words)) for title, words in FAMILY_WORDS.items()}
    counts |= {name: len(files_of_operation(name)) for name in OPERATION_WORDS}
    assert all(counts.values())
    assert {name: count for name, count in counts.items() if count > MOST_FILES} == {}


def test_the_words_are_those_of_all_families():
    """Their own names, in their own files."""
    assert set(FAMILY_WORDS) == {family.title for family in FAMILIES.values()}
    # Tests have some of their own.
    architectures = [name for name in ARCHITECTURES if files_with(f'"{name}"')]
    names = {f'"{name}"': FAMILY_WORDS[family.title] for name, family in FAMILIES.items()}
    names |= {f'"{name}"': sum(FAMILY_WORDS.values(), ()) for name in architectures}
    assert not [name for name, words in names.items() if not having(words, {"a": name})]
    for title, words in FAMILY_WORDS.items():
        assert modules_of(title) <= set(files_with(*words)), title


def test_each_position_wise_operation_is_counted():
    blocks = [n for n, text in product().items() if re.search(r"kind: ClassVar\[str\] = ", text)]
    counted = set[str]().union(*map(files_of_operation, OPERATION_WORDS))
    assert len(blocks) > 2 and set(blocks) <= counted


def imported_by_one() -> Iterable[tuple[str, str, str]]:
    """(a family's module, the file, the name in it) of what only this module uses."""
    users: dict[tuple[str, str], set[str]] = {}
    for user, text in product().items():
        for module, names in _IMPORT.findall(text):
            for name in re.findall(r"(\w+)(?: as \w+)?", names):
                file = f"src/hotsplit/{module.replace('.', '/')}.py"
                users.setdefault((file, name), set()).add(user)
    modules = {module for title in FAMILY_WORDS for module in modules_of(title)} - {TABLE}
    for (file, name), by in users.items():
        text = product().get(file, "")
        if len(by) == 1 and by < modules and len(re.findall(rf"\b{name}\b", text)) == 1:
            yield (*by, file, name)


def test_what_one_family_alone_uses_is_among_its_words():
    words = {module: set() for title in FAMILY_WORDS for module in modules_of(title)}
    for title, patterns in FAMILY_WORDS.items():
        for module in modules_of(title):
            words[module] |= set(patterns)
    found = list(imported_by_one())
    assert len(found) > 5
    assert [each for each in found if not having(words[each[0]], {"": each[2]})] == []


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_the_guide_has_the_counts(table):
    assert table() in GUIDE.read_text(), f"run {Path(__file__).relative_to(ROOT)}"


@pytest.mark.parametrize(
    "pattern, letters",
    [(r"\bphi-?3", "phi"), ("Gemma ?4", "gemma"), (r"Qwen 3\.5", "qwen 3"), (r'(?<!x )"llama"', '"llama"')],
)  # fmt: skip
def test_a_quick_search_finds_what_a_pattern_does(pattern, letters):
    assert first_letters(pattern) == letters


def test_a_file_too_many_is_found():
    code = {f"run/{name}.py": "x = 'arcee'" for name in "abcdefg"} | {"run/h.py": "x = 'other'"}
    assert len(having(FAMILY_WORDS["Arcee"], code)) == MOST_FILES + 1


def test_comments_and_docstrings_do_not_count():
    text = '"""Arcee."""\nx = "# arcee"  # Arcee\ny = \'\'\n\ndef f():\n    """As Arcee.\n\n    Arcee."""\n'
    assert re.findall("(?i)arcee", without_comments("a.py", text)) == ["arcee"]
    text = '/* Arcee\n Arcee */ int x;  // Arcee\nconst char* s = "//arcee"; // Arcee'
    assert re.findall("(?i)arcee", without_comments("a.cpp", text)) == ["arcee"]


def names_in(text: str) -> set[str]:
    """The names of models in a list such as "Qwen 2, 2.5 and 3, Phi-3": what begins with a digit is a
    version of the name before it."""
    plain = re.sub(r"\(.*?\)|（.*?）", "", text)
    found, name = set(), ""
    for part in re.split(r"\s*(?:[,;、，；|]|\band\b|和|与)\s*", plain):
        if not part[:1].isdigit():
            name = re.match(r"\D*", part)[0]
        found.add(part if not part[:1].isdigit() else name + part)
    return found


def missing_families(text: str) -> list[str]:
    """The titles of families that a README's table of models does not have."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [
        family.title
        for family in FAMILIES.values()
        if not any(names_in(family.title.removesuffix(" MoE")) <= names_in(row) for row in rows)
    ]


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_a_readme_has_all_families(name):
    assert missing_families((ROOT / name).read_text()) == []


@pytest.mark.parametrize("change", [("3n", "3"), ("SmolLM3", "SmolLM"), ("4-mini", "4")])
def test_a_family_that_a_readme_lacks_is_named(change):
    text = (ROOT / "README.md").read_text().replace(*change)
    (missing,) = set(missing_families(text))
    assert change[0] in missing


def write_tables() -> None:
    """Puts the tables into the guide, each in place of the one with the same head."""
    text = GUIDE.read_text()
    for table in TABLES:
        head = re.escape(table().partition("\n")[0])
        text = re.sub(head + r"(\n\|.*)*", lambda _, table=table: table(), text)
    GUIDE.write_text(text)


if __name__ == "__main__":
    write_tables()

"""Parses PTX text into kernels: declarations, parameters, and basic blocks of instructions.

Only the syntax is handled here, not what instructions do."""

import re
from dataclasses import dataclass, field

from ptx.faults import UnknownInstruction

# A basic block ends after each of these (except bar.warp), so that lanes can diverge or wait there.
ENDS = ("bra", "brx", "bar", "barrier", "ret", "exit")
_DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+(.+)")
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern)\s+)*\.(global|shared|local|const)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([\w$%]+)\s*(?:\[\s*(\d*)\s*\])?\s*(?:=\s*\{(.*)\})?$",
    re.S,
)
_PARAMETER = re.compile(
    r"\.param\s+\.(\w+)\s+(?:\.ptr\s+)?(?:\.(?:global|align)\s+\d*\s*)*([\w$]+)"
)
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_GUARD = re.compile(r"@(!?)([\w$%]+)\s+")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+([\w$%]+)")
_TABLE = re.compile(r"([\w$%]+)\s*:\s*\.branchtargets\s+([^;]+);")
_LINE = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
BYTES = {
    kind: size
    for size, kinds in {
        1: "b8 u8 s8 pred",
        2: "b16 u16 s16 f16 bf16",
        4: "b32 u32 s32 f32",
        8: "b64 u64 s64 f64",
    }.items()
    for kind in kinds.split()
}


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A module's or kernel's variable; `values` are its bytes if it has an initial value."""

    name: str
    space: str
    num_bytes: int
    align: int
    values: bytes | None


@dataclass(frozen=True, kw_only=True)
class Parameter:
    name: str
    type: str
    offset: int

    @property
    def num_bytes(self) -> int:
        return BYTES[self.type]


@dataclass(frozen=True, kw_only=True)
class Instruction:
    opcode: str  # without a guard: "ld.global.v4.b32"
    operands: tuple[str, ...]
    guard: str | None
    is_guard_negated: bool
    line: str  # of the source, "norm.py:40", or empty

    def __str__(self) -> str:
        guard = f"@{'!' * self.is_guard_negated}{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".strip()


@dataclass(kw_only=True)
class Kernel:
    name: str
    parameters: list[Parameter]
    num_threads: int | None = None  # .reqntid
    registers: dict[str, str] = field(default_factory=dict)  # name to type
    variables: list[Variable] = field(default_factory=list)
    blocks: list[list[Instruction]] = field(default_factory=list)
    block_of: dict[str, int] = field(default_factory=dict)  # label to the number of its block
    tables: dict[str, list[str]] = field(default_factory=dict)  # the labels of indexed branches


@dataclass(kw_only=True)
class Module:
    target: str = ""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)


def parse(text: str) -> Module:
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    files = {n: p.rsplit("/", 1)[-1] for n, p in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', text)}
    module, at = Module(), 0
    while (at := _skip_spaces(text, at)) < len(text):
        at = _top_level(module, text, at, files)
    return module


def _skip_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _top_level(module: Module, text: str, at: int, files: dict[str, str]) -> int:
    """Parses the declaration that begins here; returns where it ends."""
    line_end = text.find("\n", at) % (len(text) + 1)
    line = text[at:line_end]
    if line.startswith((".version", ".address_size", ".file")):
        return line_end
    if line.startswith(".target"):
        module.target = line.split()[1]
        return line_end
    if line.startswith(".section"):
        return _closing(text, text.index("{", at)) + 1
    if re.match(r"(\.visible\s+)?\.entry\b", line):
        opening = text.index("{", at)
        closing = _closing(text, opening)
        kernel = _head(text[at:opening])
        _Body(kernel, files).read(text[opening + 1 : closing])
        module.kernels[kernel.name] = kernel
        return closing + 1
    end = text.find(";", at)
    module.variables.append(_variable(text[at:end].strip()))
    return end + 1


def _closing(text: str, at: int) -> int:
    depth = 0
    for found in re.finditer(r"[{}]", text[at:]):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return at + found.start()
    raise UnknownInstruction("a brace is not closed")


def _variable(text: str) -> Variable:
    found = _VARIABLE.fullmatch(text)
    if found is None:
        raise UnknownInstruction(f"declaration {text[:80]!r}")
    space, align, kind, name, count, values = found.groups()
    size = BYTES[kind]
    data = None
    if values is not None:
        numbers = [int(value, 0) for value in values.split(",")]
        data = b"".join((number % (1 << 8 * size)).to_bytes(size, "little") for number in numbers)
    length = size * (int(count or 0) if count is not None else 1)
    return Variable(name=name, space=space, num_bytes=length, align=int(align or size), values=data)


def _head(text: str) -> Kernel:
    name = re.search(r"\.entry\s+([\w$]+)", text)[1]
    parameters, offset = [], 0
    for kind, parameter in _PARAMETER.findall(text):
        offset = -(-offset // BYTES[kind]) * BYTES[kind]
        parameters.append(Parameter(name=parameter, type=kind, offset=offset))
        offset += BYTES[kind]
    assert len(parameters) == text.count(".param"), text
    threads = re.search(r"\.reqntid\s+(\d+)", text)
    return Kernel(
        name=name, parameters=parameters, num_threads=int(threads[1]) if threads else None
    )


class _Body:
    """Reads the statements between a kernel's braces."""

    def __init__(self, kernel: Kernel, files: dict[str, str]):
        self.kernel, self.files = kernel, files
        self.scopes: list[dict[str, str]] = [{}]  # new names of registers, per open brace
        self.block: list[Instruction] = []
        self.line = ""
        self.targets: set[str] = set()

    def read(self, text: str) -> None:
        tables = {name: split_operands(labels) for name, labels in _TABLE.findall(text)}
        self.kernel.tables, at = tables, 0
        self.targets = {*_BRANCH.findall(text), *(each for own in tables.values() for each in own)}
        while (at := _skip_spaces(text, at)) < len(text):
            at = self._statement(text, at)
        self._end_block()

    def _statement(self, text: str, at: int) -> int:
        if text[at] == "{":
            self.scopes.append({})
            return at + 1
        if text[at] == "}":
            self.scopes.pop()
            return at + 1
        if re.match(r"\.loc\s", text[at : at + 5]):
            end = text.find("\n", at)
            number, line = _LINE.match(text, at).groups()
            self.line = f"{self.files.get(number, '?')}:{line}"
            return end
        if table := _TABLE.match(text, at):
            return table.end()
        if label := _LABEL.match(text, at):
            if label[1] in self.targets:
                self._end_block()
                self.kernel.block_of[label[1]] = len(self.kernel.blocks)
            return label.end()
        end = text.index(";", at)
        self._finish(" ".join(text[at:end].split()))
        return end + 1

    def _end_block(self) -> None:
        if self.block:
            self.kernel.blocks.append(self.block)
            self.block = []

    def _finish(self, statement: str) -> None:
        if not statement or statement.startswith(".pragma"):
            return
        if statement.startswith(".reg"):
            self._declare(statement)
        elif statement.startswith("."):
            self.kernel.variables.append(_variable(statement))
        else:
            self._instruction(statement)

    def _declare(self, statement: str) -> None:
        kind, names = _DECLARED.fullmatch(statement).groups()
        for name in re.split(r"\s*,\s*", names):
            if found := re.fullmatch(r"([\w$%]+)<(\d+)>", name):
                every = [f"{found[1]}{number}" for number in range(int(found[2]))]
            else:
                every = [name]
            for each in every:
                unique = each
                while unique in self.kernel.registers:
                    unique += "'"
                if unique != each:
                    self.scopes[-1][each] = unique
                self.kernel.registers[unique] = kind

    def _named(self, text: str) -> str:
        """The text with registers of inner scopes replaced by their unique names."""
        if not any(self.scopes):
            return text
        renamed = {old: new for scope in self.scopes for old, new in scope.items()}
        return re.sub(r"[\w$%]+", lambda found: renamed.get(found[0], found[0]), text)

    def _instruction(self, statement: str) -> None:
        guard, is_negated = None, False
        if found := _GUARD.match(statement):
            is_negated, guard = found[1] == "!", self._named(found[2])
            statement = statement[found.end() :]
        opcode, _, rest = statement.partition(" ")
        self.block.append(
            Instruction(
                opcode=opcode,
                operands=tuple(split_operands(self._named(rest))),
                guard=guard,
                is_guard_negated=is_negated,
                line=self.line,
            )
        )
        if opcode.split(".")[0] in ENDS and not opcode.startswith("bar.warp"):
            self._end_block()


def split_operands(text: str) -> list[str]:
    """Splits at the commas outside of braces and brackets."""
    found, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign in "{[") - (sign in "}]")
        if sign == "," and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*found, last] if last else found

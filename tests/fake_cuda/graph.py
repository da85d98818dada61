"""A captured graph as data: its nodes, the memory they use, and their order."""

from dataclasses import dataclass

from fake_cuda import library
from fake_cuda.library import Range

FLAGS = {"write flag", "host function", "wait for flag"}  # nodes of hand-overs to the CPU


@dataclass(frozen=True, kw_only=True)
class Node:
    name: str
    stream: int
    ranges: tuple[Range, ...]

    def conflicts(self, other: "Node") -> bool:
        """True if either node writes memory that the other uses."""
        return any(
            (mine or theirs) and a < b + size_b and b < a + size_a
            for a, size_a, mine in self.ranges
            for b, size_b, theirs in other.ranges
        )


@dataclass(frozen=True, kw_only=True)
class Graph:
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]  # (first, second), in the order that fakeGraphOmit counts

    @classmethod
    def of(cls, handle: int) -> "Graph":
        """The graph behind the handle of an executable graph."""
        nodes, edges = [], []
        for kind, _, *rest in library.graph_text(handle):
            if kind == "edge":
                edges.append((int(rest[0]), int(rest[1])))
                continue
            name, stream, *uses = rest
            nodes.append(Node(name=name, stream=int(stream), ranges=tuple(map(_range, uses))))
        return cls(nodes=tuple(nodes), edges=tuple(edges))

    @property
    def kernels(self) -> list[int]:
        """The numbers of the nodes that are kernels."""
        others = ("copy", *FLAGS)
        return [number for number, node in enumerate(self.nodes) if node.name not in others]

    def before(self, omitted: int | None = None) -> list[set[int]]:
        """The nodes that certainly run before each node, without edge `omitted`."""
        found: list[set[int]] = [set() for _ in self.nodes]
        for number, (first, second) in sorted(enumerate(self.edges), key=lambda item: item[1][1]):
            if number != omitted:
                found[second] |= {first} | found[first]
        return found

    def race_without(self, omitted: int | None) -> tuple[Node, Node] | None:
        """Two conflicting nodes that nothing orders if edge `omitted` is left out."""
        before = self.before(omitted)
        for second, node in enumerate(self.nodes):
            for first in range(second):
                if first not in before[second] and self.nodes[first].conflicts(node):
                    return self.nodes[first], node
        return None


def _range(text: str) -> Range:
    kind, start, size = text.split()
    return int(start), int(size), kind == "w"

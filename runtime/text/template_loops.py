"""Ends the loops of a template that have found what they look for.

Jinja has no `break` of its own, so templates search with a flag:

    {%- for j in range(loop.index0 - 1, -1, -1) %}
        {%- if not seen.it %}...{%- set seen.it = true %}...{%- endif %}
    {%- endfor %}

Where every message looks at all others, as in Gemma 4's template, 4,096 messages take 10 to 20 s.
An iteration without any effect, because of conditions that do not depend on the loop's variable,
is followed by others of the same kind: the text is the same if the loop ends there."""

from jinja2 import nodes

# What a condition may consist of; reading it changes nothing.
_PLAIN = (
    nodes.Name,
    nodes.Const,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Not,
    nodes.And,
    nodes.Or,
    nodes.Compare,
    nodes.Operand,
)


def end_idle_loops(template: nodes.Template) -> None:
    """Changes `template`: loops over numbers or a slice, whose body is one `if`, end at an
    iteration without effect that is followed only by others."""
    for loop in template.find_all(nodes.For):
        if len(loop.body) == 1 and isinstance(choice := loop.body[0], nodes.If):
            own = {"loop", *_names(loop.target)}
            if _is_sequence(loop.iter):
                _end_where_idle(choice, own)


def _end_where_idle(choice: nodes.If, own: set[str]) -> None:
    """Adds a break to each empty branch that is reached through conditions without `own`, the names
    of the loop's variables."""
    for branch in (choice, *choice.elif_):
        if not _is_plain(branch.test, own):
            return
        if not branch.body:
            branch.body = [nodes.Break(lineno=branch.lineno)]
    if not choice.else_:
        choice.else_ = [nodes.Break(lineno=choice.lineno)]


def _is_sequence(iterated: nodes.Node) -> bool:
    """Whether reading fewer of its items changes nothing, as it would for a generator."""
    if isinstance(iterated, nodes.Call):
        return isinstance(iterated.node, nodes.Name) and iterated.node.name == "range"
    return isinstance(iterated, nodes.Getitem) and isinstance(iterated.arg, nodes.Slice)


def _is_plain(test: nodes.Node, own: set[str]) -> bool:
    is_known = all(isinstance(part, _PLAIN) for part in (test, *test.find_all(nodes.Node)))
    return is_known and not own & _names(test)


def _names(node: nodes.Node) -> set[str]:
    found = {name.name for name in node.find_all(nodes.Name)}
    return found | {node.name} if isinstance(node, nodes.Name) else found

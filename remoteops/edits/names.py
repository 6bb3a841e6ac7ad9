"""Edits of attributes, imports and expressions."""

from __future__ import annotations

import libcst as cst

from remoteops.edits import anchors, patterns
from remoteops.edits.anchors import Args
from remoteops.edits.listing import remove_item
from remoteops.edits.source import Source, Splice

__all__ = ["rename_attribute", "rename_import", "replace_expression"]


def rename_attribute(source: Source, args: Args) -> list[Splice]:
    """``attribute``, ``to``, optionally ``receiver`` (dotted code in front of it): ``x.old`` becomes ``x.new``."""
    old, new, receiver = args["attribute"], args["to"], args.get("receiver")
    inside = anchors.within(source, args)

    def named(name: str) -> list[cst.Attribute]:
        return [
            node
            for node in source.of(cst.Attribute)
            if node.attr.value == name and inside(node) and (receiver is None or anchors.dotted(node.value) == receiver)
        ]

    found, there = named(old), named(new)
    if _at(source, args, there) or (not found and there):
        return []
    node = anchors.one(source, args, found, f"attribute .{old}")
    place = source.place(node.attr)
    return [Splice(place.start, place.end, new)]


def replace_expression(source: Source, args: Args) -> list[Splice]:
    """``old``, ``new`` (patterns); ``all: true`` replaces every match in the scope instead of asking for exactly one.

    ``bind`` gives values for holes that ``old`` does not bind itself.
    """
    given = anchors.bindings(source, args)
    old, new = patterns.expression(args["old"]), patterns.expression(args["new"])
    inside = anchors.within(source, args)
    bare = isinstance(new, cst.Name) and patterns.holes(args["new"]) and not patterns.holes(args["new"]) <= set(given)
    done: list[cst.CSTNode] = []
    found: dict[cst.CSTNode, dict[str, cst.CSTNode]] = {}
    for node in source.nodes():
        if not isinstance(node, cst.BaseExpression) or not inside(node):
            continue
        if not bare and patterns.match(new, node, given) is not None:
            done.append(node)
        bound = patterns.match(old, node, given)
        if bound is not None and node not in done:
            found[node] = bound
    covered = [source.place(node) for node in done]
    left = {
        node: bound
        for node, bound in found.items()
        if not any(place.start <= source.place(node).start and source.place(node).end <= place.end for place in covered)
    }
    if (_at(source, args, done) or done) and not left:
        return []
    if args.get("all") and left:
        chosen = list(left)
    else:
        if _at(source, args, done) and not _at(source, args, list(left)):
            return []
        chosen = [anchors.one(source, args, list(left), f"expression {args['old']}")]
    return [
        Splice(*source.place(node), patterns.fill(args["new"], {n: source.code(v) for n, v in left[node].items()}))
        for node in chosen
    ]


def _at(source: Source, args: Args, nodes: list[cst.CSTNode] | list[cst.Attribute]) -> bool:
    """Whether one of the nodes begins exactly where the anchor says."""
    if not args.get("line") or args.get("column") is None:
        return False
    offset = source.offset(args["line"], args["column"])
    return any(source.place(node).start == offset for node in nodes)


def rename_import(source: Source, args: Args) -> list[Splice]:
    """``name`` and ``to``, both ``module.attribute`` (or, for ``import module``, both modules): import it from there.

    The name that the file uses stays the same.
    """
    module, _, attribute = args["name"].rpartition(".")
    target, _, renamed = args["to"].rpartition(".")
    inside = anchors.within(source, args)
    found: dict[cst.ImportAlias, cst.ImportFrom] = {}
    there = False
    whole: list[cst.ImportAlias] = []
    for node in (*source.of(cst.ImportFrom), *source.of(cst.Import)):
        if not inside(node):
            continue
        if isinstance(node, cst.ImportFrom) and not node.relative and not isinstance(node.names, cst.ImportStar):
            path = anchors.dotted(node.module) if node.module else ""
            for alias in node.names:
                if path == module and alias.name.value == attribute:
                    found[alias] = node
                there |= path == target and alias.name.value == renamed
        elif isinstance(node, cst.Import):
            whole += [alias for alias in node.names if anchors.dotted(alias.name) == args["name"]]
            there |= any(anchors.dotted(alias.name) == args["to"] for alias in node.names)
    if whole and not found:
        return _rename_module(source, args, anchors.one(source, args, whole, f"import of {args['name']}"))
    if not found and there:
        return []
    chosen = anchors.one(source, args, list(found), f"import of {args['name']}")
    return _move(source, found[chosen], chosen, target, renamed)


def _move(source: Source, statement: cst.ImportFrom, alias: cst.ImportAlias, target: str, renamed: str) -> list[Splice]:
    assert statement.module is not None and not isinstance(statement.names, cst.ImportStar)
    local = anchors.dotted(alias.asname.name) if alias.asname is not None else anchors.dotted(alias.name)
    imported = renamed if renamed == local else f"{renamed} as {local}"
    names = list(statement.names)
    if len(names) == 1:
        splices = [Splice(*source.place(statement.module), target)]
        if anchors.dotted(alias.name) != renamed:
            splices.append(Splice(*source.place(alias), imported))
        return splices
    line = source.parent(statement)
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        raise source.refuse("the import shares its line with other statements", at=source.place(statement).start)
    end = source.line_end(source.place(statement).end)
    added = _extend(source, line, target, imported)
    if not added:
        added = [
            Splice(
                end,
                end,
                f"{source.newline}{source.indent(source.place(statement).start)}from {target} import {imported}",
            )
        ]
    return [*remove_item(source, names, alias), *added]


def _extend(source: Source, line: cst.SimpleStatementLine, target: str, imported: str) -> list[Splice]:
    """Add to a plain ``from target import …`` that directly follows, where there is one."""
    block = source.parent(line)
    body = list(block.body) if isinstance(block, cst.Module | cst.IndentedBlock) else []
    following = body[body.index(line) + 1] if line in body[:-1] else None
    if not isinstance(following, cst.SimpleStatementLine) or len(following.body) != 1:
        return []
    found = following.body[0]
    if (
        isinstance(found, cst.ImportFrom)
        and found.module is not None
        and not found.relative
        and anchors.dotted(found.module) == target
        and not isinstance(found.names, cst.ImportStar)
        and found.lpar is None
    ):
        end = source.place(list(found.names)[-1]).end
        return [Splice(end, end, f", {imported}")]
    return []


def _rename_module(source: Source, args: Args, alias: cst.ImportAlias) -> list[Splice]:
    splices = [Splice(*source.place(alias.name), args["to"])]
    if alias.asname is None:
        splices += [
            Splice(*source.place(node), args["to"])
            for node in source.of(cst.Attribute)
            if anchors.dotted(node) == args["name"] and node is not alias.name
        ]
    return splices

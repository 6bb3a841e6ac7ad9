"""How a consumer uses a provider, asked in the words of a contract: calls, patterns, strings, what surrounds them."""

from __future__ import annotations

import ast
import fnmatch
import re
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

from remoteops.agent.audit import patterns
from remoteops.agent.audit.shapes import Provider

Query = Dict[str, Any]
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Module:
    """One file of the consumer: text, tree (None when it cannot be parsed) and each node's parent."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text
        self._tree: Optional[ast.Module] = None
        self._parents: Optional[Dict[ast.AST, ast.AST]] = None
        self._nodes: Optional[Dict[type, List[ast.AST]]] = None
        self.error: Optional[str] = None

    @property
    def tree(self) -> ast.Module:
        if self._tree is None:
            try:
                self._tree = ast.parse(self.text)
            except (SyntaxError, ValueError, RecursionError) as error:
                self.error = str(error)
                self._tree = ast.Module(body=[], type_ignores=[])
        return self._tree

    def nodes(self, *kinds: type) -> List[ast.AST]:
        """Nodes of some types in source order (all nodes without a type)."""
        if self._nodes is None:
            self._nodes = {}
            for node in patterns.walk(self.tree):
                self._nodes.setdefault(type(node), []).append(node)
                self._nodes.setdefault(ast.AST, []).append(node)
        if len(kinds) == 1:
            return self._nodes.get(kinds[0], [])
        return [node for node in self._nodes.get(ast.AST, []) if not kinds or type(node) in kinds]

    def parent(self, node: ast.AST) -> Optional[ast.AST]:
        if self._parents is None:
            self._parents = {child: parent for parent in self.nodes() for child in ast.iter_child_nodes(parent)}
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        above = self.parent(node)
        while above is not None:
            yield above
            above = self.parent(above)

    def enclosing(self, node: ast.AST, kinds: Tuple[type, ...]) -> ast.AST:
        return next((above for above in self.ancestors(node) if isinstance(above, kinds)), self.tree)

    def scope(self, node: ast.AST) -> str:
        """Qualified name of the enclosing function or class ("" at module level)."""
        names = [above.name for above in self.ancestors(node) if isinstance(above, _SCOPES)]
        return ".".join(reversed(names))

    def at(self, line: int, column: int, kind: type) -> Optional[ast.AST]:
        """The outermost node of a type that starts at a position."""
        for node in self.nodes(kind):
            if getattr(node, "lineno", 0) == line and getattr(node, "col_offset", -1) == column:
                return node
        return None


class Use:
    """One place where the consumer does what a query describes. ``doubt`` says what of it could not be decided."""

    def __init__(self, module: Module, node: ast.AST, symbol: str, target: str, doubt: str = "") -> None:
        self.module = module
        self.node = node
        self.symbol = symbol
        self.target = target
        self.doubt = doubt

    @property
    def file(self) -> str:
        return self.module.file

    @property
    def line(self) -> int:
        return int(getattr(self.node, "lineno", 1))


class Consumer:
    """The consumer's files and call sites.

    ``calls`` are (file, line, column, symbol, target): what the audit's engine resolved, the symbol as the consumer
    reaches it and the target where the provider defines it. ``finish`` completes a finding (id, check, anchor).
    """

    def __init__(self, modules: Dict[str, Module], calls: List[Tuple[str, int, int, str, str]], finish: Any) -> None:
        self.modules = modules
        self.calls = calls
        self._finish = finish

    def find(self, query: Query, provider: Provider, only: Optional[Set[str]] = None) -> Iterator[Use]:
        """Every use that a query of a contract describes, in the order of the files (``only`` those, when given)."""
        modules = [module for file, module in self.modules.items() if only is None or file in only]
        if "call" in query:
            yield from self._calls(query, provider, only)
        elif "pattern" in query:
            wanted = patterns.kinds(patterns.compile_pattern(query["pattern"]))
            name = patterns.needle(query["pattern"])
            for module in modules:
                if name in module.text:
                    for node, _ in patterns.find(query["pattern"], module.tree, nodes=module.nodes(*wanted)):
                        if "unless" in query and _is(query["unless"], node):
                            continue
                        yield Use(module, node, _dotted(node), "")
        elif "string" in query:
            yield from self._strings(query["string"], modules)
        else:
            raise KeyError("uses knows no query %s" % sorted(query))

    def present(self, query: Query, anchor: Use, provider: Provider) -> bool:
        """Whether something is in the anchor's ``function``, ``class``, ``module`` or anywhere in the ``package``."""
        area = query.get("in", "package")
        for use in self.find(query, provider):
            if area == "package" or self.together(anchor, use, area):
                return True
        return False

    def together(self, anchor: Use, use: Use, area: str) -> bool:
        """Whether a use stands in the same function, class or module as the anchor."""
        return use.module is anchor.module and self._area(anchor, area) in [use.node, *use.module.ancestors(use.node)]

    def finding(self, use: Use, **fields: Any) -> Dict[str, Any]:
        """A complete finding at a use (keys of remoteops.probe/1)."""
        node: Any = use.node
        anchor = {
            "line": node.lineno,
            "column": node.col_offset,
            "end_line": node.end_lineno,
            "end_column": node.end_col_offset,
        }
        finding: Dict[str, Any] = {
            **fields,
            "file": use.file,
            "line": node.lineno,
            "column": node.col_offset,
            "scope": use.module.scope(node),
            "anchor": anchor,
        }
        self._finish(finding)
        return finding

    # -- calls -----------------------------------------------------------------------------------------------------

    def _calls(self, query: Query, provider: Provider, only: Optional[Set[str]]) -> Iterator[Use]:
        wanted = query["call"] if isinstance(query["call"], list) else [query["call"]]
        for file, line, column, symbol, target in self.calls:
            symbol, target = callee(symbol), callee(target)
            if not any(fnmatch.fnmatchcase(name, glob) for name in (symbol, target) if name for glob in wanted):
                continue
            if only is not None and file not in only:
                continue
            module = self.modules.get(file)
            node = module.at(line, column, ast.Call) if module else None
            if module is None or not isinstance(node, ast.Call):
                continue
            use = Use(module, node, symbol, target)
            if self._fits(query, use, node, provider):
                yield use

    def _fits(self, query: Query, use: Use, node: ast.Call, provider: Provider) -> bool:
        given, doubt = arguments(node, provider.parameters(use.target or use.symbol))
        if any(name in given for name in query.get("without", [])):
            return False
        if query.get("without") and doubt:
            use.doubt = "the call unpacks %s, which may hold %s" % (doubt, ", ".join(query["without"]))
        for name, pattern in query.get("with", {}).items():
            if name not in given or patterns.match(patterns.compile_pattern(pattern), given[name], {}) is None:
                return False
        if "in_loop" in query and not self._in_loop(use, query["in_loop"]):
            return False
        if query.get("guards_raise") and not self._guards_raise(use):
            return False
        if "result" in query and not self._result(use, query["result"]):
            return False
        if "result_not" in query and self._result(use, query["result_not"]):
            return False
        return "result_any" not in query or any(self._result(use, pattern) for pattern in query["result_any"])

    def _in_loop(self, use: Use, pattern: str) -> bool:
        """In a loop that does ``pattern``, on every pass: no condition stands between the loop and the call."""
        for above in use.module.ancestors(use.node):
            if isinstance(above, _LOOPS) and next(patterns.find(pattern, above), None) is not None:
                return True
            if isinstance(above, (ast.If, ast.IfExp, *_FUNCTIONS)):
                return False
        return False

    def _guards_raise(self, use: Use) -> bool:
        for above in use.module.ancestors(use.node):
            if isinstance(above, ast.If):
                return any(use.node is part for part in ast.walk(above.test)) and any(
                    isinstance(part, ast.Raise) for part in ast.walk(above)
                )
            if isinstance(above, ast.stmt):
                return False
        return False

    def _result(self, use: Use, pattern: str) -> bool:
        """Whether the enclosing function does ``pattern`` with the call's result (``$RESULT``) or its name."""
        above = use.module.parent(use.node)
        result: ast.AST = use.node
        if isinstance(above, ast.Await):
            result, above = above, use.module.parent(above)
        function = use.module.enclosing(use.node, _FUNCTIONS)
        if next(patterns.find(pattern, function, {"RESULT": result}), None) is not None:
            return True
        targets: List[ast.AST] = []
        if isinstance(above, ast.Assign):
            targets = list(above.targets)
        elif isinstance(above, (ast.AnnAssign, ast.NamedExpr)):
            targets = [above.target]
        return any(next(patterns.find(pattern, function, {"RESULT": target}), None) is not None for target in targets)

    # -- the rest --------------------------------------------------------------------------------------------------

    def _strings(self, expression: str, modules: List[Module]) -> Iterator[Use]:
        compiled = re.compile(expression)
        name = max(re.findall(r"[A-Za-z0-9_/-]+", expression), key=len, default="")
        for module in modules:
            if name not in module.text:
                continue
            for node in module.nodes(ast.Constant, ast.JoinedStr):
                if not isinstance(module.parent(node), (ast.Expr, ast.JoinedStr)):
                    text = patterns.literal_text(node)
                    if text is not None and compiled.search(text):
                        yield Use(module, node, text, "")

    def _area(self, anchor: Use, area: str) -> ast.AST:
        if area == "module":
            return anchor.module.tree
        kinds: Tuple[type, ...] = (ast.ClassDef,) if area == "class" else _FUNCTIONS
        return anchor.module.enclosing(anchor.node, kinds)


def arguments(node: ast.Call, parameters: Optional[Dict[str, Optional[str]]]) -> Tuple[Dict[str, ast.AST], str]:
    """Arguments by parameter name, and the text of the first ``*`` or ``**`` (which may pass anything)."""
    given: Dict[str, ast.AST] = {}
    doubt = ""
    names = list(parameters or {})
    for position, argument in enumerate(node.args):
        if isinstance(argument, ast.Starred):
            doubt = "*" + ast.unparse(argument.value)
            break
        if position < len(names):
            given[names[position]] = argument
    for keyword in node.keywords:
        if keyword.arg is None:
            doubt = doubt or "**" + ast.unparse(keyword.value)
        else:
            given[keyword.arg] = keyword.value
    return given, doubt


def _is(pattern: str, node: ast.AST) -> bool:
    return patterns.match(patterns.compile_pattern(pattern), node, {}) is not None


def _dotted(node: ast.AST) -> str:
    try:
        return ast.unparse(node).splitlines()[0]
    except (ValueError, RecursionError):
        return type(node).__name__


def callee(symbol: str) -> str:
    """A class stands for its constructor."""
    head, _, last = symbol.rpartition(".")
    return head if last in ("__init__", "__new__", "__post_init__") else symbol

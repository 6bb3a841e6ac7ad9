"""The provider as contracts, baseline and runtime ask about it: names, definitions, parameters, texts."""

from __future__ import annotations

import ast
import re
from typing import Callable, Dict, Optional, Set, Tuple

from remoteops.agent.audit.classes import Classes, Member
from remoteops.agent.audit.constructors import Constructors
from remoteops.agent.audit.decorators import Decorators
from remoteops.agent.audit.index import ClassInfo, FunctionInfo, Index, Symbol
from remoteops.agent.audit.modules import Module
from remoteops.agent.audit.packages import Tree, locate
from remoteops.agent.audit.signatures import VAR_KEYWORD, VAR_POSITIONAL, Signature, from_arguments
from remoteops.agent.audit.syntax import Unit, decode

Parameters = Dict[str, Optional[str]]


class Found:
    """A definition: ``path`` relative to the folder that holds the package, its first line, its text and its tree.

    The tree is made when it is first asked for: a class of 200 kB is often only searched as text.
    """

    def __init__(self, path: str, line: int, text: str, parse: Callable[[], Optional[ast.AST]]) -> None:
        self.path = path
        self.line = line
        self.text = text
        self._parse: Optional[Callable[[], Optional[ast.AST]]] = parse
        self._node: Optional[ast.AST] = None

    @property
    def node(self) -> Optional[ast.AST]:
        if self._parse is not None:
            self._node, self._parse = self._parse(), None
        return self._node


class Provider:
    """Read-only questions about one package; every name is a dotted path, re-exports and base classes are followed."""

    def __init__(self, tree: Tree, index: Index, classes: Classes) -> None:
        self.tree = tree
        self.package = tree.package
        self.index = index
        self.classes = classes
        self.constructors = Constructors(classes, Decorators(classes))
        self._parameters: Dict[str, Optional[Parameters]] = {}

    @classmethod
    def open(cls, package: str, path: Optional[str] = None, venv: Optional[str] = None) -> Provider:
        """A package in a folder or a venv, by itself. Raises AgentError as ``packages.locate`` does."""
        tree = locate(package, path, venv)
        index = Index([tree])
        return cls(tree, index, Classes(index))

    def exists(self, dotted: str) -> Tuple[Optional[bool], str]:
        """Whether there is such a name; (None, why) when the sources cannot tell."""
        module, rest = self.index.split(dotted)
        if module is None:
            return False, ""
        if not rest:
            return True, ""
        symbol = self.index.lookup(module, rest[0])
        for name in rest[1:]:
            if symbol is None:
                return False, ""
            if symbol.kind == "class" and symbol.klass is not None:
                answer, why = self.classes.has(symbol.klass, name)
                if name == rest[-1] or answer is not True:
                    return answer, why
                member = self.classes.member(symbol.klass, name)
                symbol = self._nested(member) if member is not None else None
            elif symbol.kind == "module" and symbol.module is not None:
                symbol = self.index.lookup(symbol.module, name)
            else:
                return None, "%s is not a class or module whose members the sources show" % symbol.name
        if symbol is None:
            return False, ""
        return (True, "") if symbol.certain else (None, symbol.reason)

    def definition(self, dotted: str) -> Optional[Found]:
        """Where a module, class, function, method, field or module variable is defined; None when there is none."""
        module, rest = self.index.split(dotted)
        if module is None:
            return None
        if not rest:
            return self._module(module)
        symbol = self.index.lookup(module, rest[0])
        for name in rest[1:]:
            if symbol is None:
                return None
            if symbol.kind == "module" and symbol.module is not None:
                symbol = self.index.lookup(symbol.module, name)
                continue
            if symbol.kind != "class" or symbol.klass is None:
                return None
            member = self.classes.member(symbol.klass, name) or next(
                iter(self.classes.assigned(symbol.klass, name)), None
            )
            if member is None:
                return None
            if name == rest[-1]:
                return self._member(member)
            symbol = self._nested(member)
        return self._symbol(symbol) if symbol is not None else None

    def parameters(self, dotted: str) -> Optional[Parameters]:
        """Parameters of a callable (without self) or of a class's constructor, in order, each with its default's text.

        None for a parameter that is required; None as a whole when there is nothing to call or no signature to see.
        """
        if dotted not in self._parameters:
            self._parameters[dotted] = self._find_parameters(dotted)
        return self._parameters[dotted]

    def mentions(self, package: str, expression: str) -> bool:
        """Whether any file of a package of the provider has a text that a regular expression finds.

        Files are searched for a plain part of the expression first: decoding a thousand files takes a second.
        """
        alternatives = expression.split("|") if "(" not in expression else [expression]
        for one in alternatives:
            compiled = re.compile(one)
            literal = max(re.findall(r"[A-Za-z0-9_/ ]+", re.sub(r"\\\w|\[[^\]]*\]", ".", one)), key=len, default="")
            for _, path in self.index.grep(self.package, literal.encode(), near=package):
                if compiled.search(decode(self.index.data(self.tree, path))[0]):
                    return True
        return False

    def bases_of_class_under(self, package: str, name: str) -> Optional[Set[str]]:
        """Simple names of all bases of the class ``name`` defined anywhere under a package; None when there is none."""
        klass = self._class_under(package, name)
        if klass is None:
            return None
        line = self.classes.lineage(klass)
        return {one.name for one in line.classes} | {base.rpartition(".")[2] for base in line.external}

    def class_has(self, package: str, name: str, attribute: str) -> Tuple[Optional[bool], str]:
        """Whether objects of the class ``name`` defined under a package have an attribute that its own code sets.

        Bases without source (a module class of a tensor library) set nothing under a name that the class does not.
        """
        klass = self._class_under(package, name)
        if klass is None:
            return None, "no class %s under %s" % (name, package)
        if self.classes.member(klass, attribute) is not None or self.classes.assigned(klass, attribute):
            return True, ""
        return False, ""

    def _class_under(self, package: str, name: str) -> Optional[ClassInfo]:
        for module_name, _ in self.index.grep(self.package, b"class " + name.encode(), near=package):
            module = self.index.module(module_name)
            symbol = self.index.lookup(module, name) if module is not None else None
            if symbol is not None and symbol.klass is not None and symbol.klass.name == name:
                return symbol.klass
        return None

    # -- how the index says it -------------------------------------------------------------------------------------

    def _find_parameters(self, dotted: str) -> Optional[Parameters]:
        head, _, last = dotted.rpartition(".")
        target = head if last in ("__init__", "__new__") else dotted
        klass = self.class_info(target)
        if klass is not None:
            return self._constructor(klass)
        found = self.definition(dotted)
        if found is None or not isinstance(found.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        names = _named(from_arguments(found.node.args))
        decorators = {getattr(one, "id", "") for one in found.node.decorator_list}
        if self.class_info(head) is not None and "staticmethod" not in decorators:
            names.pop(next(iter(names), ""), None)
        return names

    def _constructor(self, klass: ClassInfo) -> Optional[Parameters]:
        signature = self.constructors.of(klass).signature
        return _named(signature) if signature is not None else None

    def class_info(self, dotted: str) -> Optional[ClassInfo]:
        module, rest = self.index.split(dotted)
        if module is None or not rest:
            return None
        symbol = self.index.lookup(module, rest[0])
        for name in rest[1:]:
            if symbol is not None and symbol.kind == "module" and symbol.module is not None:
                symbol = self.index.lookup(symbol.module, name)
            elif symbol is not None and symbol.klass is not None:
                member = self.classes.member(symbol.klass, name)
                symbol = self._nested(member) if member is not None else None
            else:
                return None
        return symbol.klass if symbol is not None and symbol.kind == "class" else None

    def _nested(self, member: Member) -> Optional[Symbol]:
        if member.kind != "class" or member.unit is None:
            return None
        info = self.index.class_info(member.owner.module, member.unit, member.owner.qualname + ".")
        return Symbol("class", info.dotted, module=info.module, klass=info)

    def _symbol(self, symbol: Symbol) -> Optional[Found]:
        info: Optional[object] = symbol.klass or symbol.function
        if isinstance(info, (ClassInfo, FunctionInfo)):
            return self._unit(info.module, info.unit)
        if symbol.kind == "module" and symbol.module is not None:
            return self._module(symbol.module)
        if symbol.binding is not None and symbol.module is not None and isinstance(symbol.binding.node, ast.AST):
            return self._node(symbol.module, symbol.binding.node)
        return None

    def _member(self, member: Member) -> Optional[Found]:
        if member.unit is not None:
            return self._unit(member.owner.module, member.unit)
        return self._node(member.owner.module, member.node) if member.node is not None else None

    def _unit(self, module: Module, unit: Unit) -> Found:
        return Found(self._path(module), unit.line, unit.text, unit.node)

    def _node(self, module: Module, node: ast.AST) -> Found:
        first = int(getattr(node, "lineno", 1))
        last = int(getattr(node, "end_lineno", None) or first)
        text = module.source.text[module.source.offset_of(first, 0) : module.source.offset_of(last + 1, 0)]
        return Found(self._path(module), int(getattr(node, "lineno", 1)), text, lambda: node)

    def _module(self, module: Module) -> Found:
        source = module.source
        return Found(self._path(module), 1, source.text, lambda: source.parse(source.text, 1))

    def _path(self, module: Module) -> str:
        return self.tree.relative(module.path)


def _named(signature: Signature) -> Parameters:
    return {one.name: one.default for one in signature.parameters if one.kind not in (VAR_POSITIONAL, VAR_KEYWORD)}

"""Classes that derive from a class: found in the text first, so that only files that matter are read."""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Tuple

from remoteops.agent.audit.classes import Classes
from remoteops.agent.audit.index import ClassInfo, Index

MAX_CLASSES = 600


class Subclasses:
    """``only`` narrows the answer to one class by its plain name (the architecture that the user runs), where it
    is among them.
    """

    def __init__(self, index: Index, classes: Classes, packages: List[str], only: Optional[str] = None) -> None:
        self.index = index
        self.classes = classes
        self.packages = packages
        self.only = only
        self._below: Dict[int, List[ClassInfo]] = {}
        self._headers: Optional[List[Tuple[str, str, str]]] = None
        self._naming: Optional[Dict[str, List[Tuple[str, str, str]]]] = None

    def below(self, info: ClassInfo) -> List[ClassInfo]:
        """Every class of the trees that derives from the given one, in a stable order."""
        if id(info) not in self._below:
            found: Dict[int, ClassInfo] = {}
            pending = [info]
            while pending and len(found) < MAX_CLASSES:
                base = pending.pop(0)
                for klass in self._direct(base):
                    if id(klass) not in found and klass is not info:
                        found[id(klass)] = klass
                        pending.append(klass)
            chosen = list(found.values())
            if self.only and any(k.name == self.only for k in chosen):
                chosen = [k for k in chosen if k.name == self.only]
            self._below[id(info)] = chosen
        return self._below[id(info)]

    def _direct(self, base: ClassInfo) -> List[ClassInfo]:
        found: List[ClassInfo] = []
        for module_name, name, _bases in self.naming().get(base.name, []):
            klass = self.class_named(module_name, name)
            if klass is not None and any(parent is base for _n, parent in self.classes.bases(klass)):
                found.append(klass)
        return found

    def naming(self) -> Dict[str, List[Tuple[str, str, str]]]:
        """Word -> headers of the classes that have it among their bases."""
        if self._naming is None:
            self._naming = {}
            for header in self.headers():
                for word in set(re.findall(r"\w+", header[2])):
                    self._naming.setdefault(word, []).append(header)
        return self._naming

    def popularity(self, name: str) -> int:
        """How many classes name a class among their bases."""
        return len(self.naming().get(name, []))

    def class_named(self, module_name: str, name: str) -> Optional[ClassInfo]:
        module = self.index.module(module_name)
        symbol = self.index.lookup(module, name) if module is not None else None
        return (
            symbol.klass if symbol is not None and symbol.klass is not None and symbol.klass.module is module else None
        )

    def headers(self) -> List[Tuple[str, str, str]]:
        """(module, class, text of its bases) of every class at the top level of a module; from the text, nothing
        is parsed.
        """
        if self._headers is None:
            pattern = re.compile(rb"[ \t]*(\w+)[ \t]*\(([^:]*)\)[ \t]*:")
            self._headers = []
            for package in self.packages:
                tree = self.index.trees[package]
                for module_name, path in tree.files():
                    data = self.index.data(tree, path)
                    at = 0 if data.startswith(b"class ") else data.find(b"\nclass ") + 1
                    while at or data.startswith(b"class "):
                        match = pattern.match(data, at + 6)
                        if match:
                            self._headers.append(
                                (module_name, match.group(1).decode(), match.group(2).decode("utf-8", "replace"))
                            )
                        at = data.find(b"\nclass ", at + 6) + 1
                        if not at:
                            break
        return self._headers

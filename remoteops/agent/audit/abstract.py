"""What classes owe to their metaclass: abstract methods left open, attributes it makes."""

from __future__ import annotations

import re
from typing import List

from remoteops.agent.audit.classes import Classes, Member
from remoteops.agent.audit.index import ClassInfo
from remoteops.agent.audit.modules import last_name
from remoteops.agent.audit.syntax import Unit


def is_abstract(unit: Unit) -> bool:
    """Whether a method stands under ``@abstractmethod`` or its like (told from its text)."""
    masked = unit.source.masked
    return (
        masked[unit.start : unit.start + 1] == "@"
        and re.search(
            r"@(?:\w+\.)*abstract(?:method|property|classmethod|staticmethod)\b",
            masked[unit.start : masked.find("def ", unit.start, unit.end)],
        )
        is not None
    )


def left_open(classes: Classes, info: ClassInfo, bases: List[ClassInfo]) -> List[Member]:
    """Abstract methods of ``bases`` that nothing before them in the lineage defines; none where no ABC is involved."""
    line = classes.lineage(info)
    metaclasses = [k.value for c in line.classes for k in getattr(classes.header(c), "keywords", [])]
    if "abc.ABC" not in line.external and not any(last_name(m) == "ABCMeta" for m in metaclasses):
        return []
    found: List[Member] = []
    for base in bases:
        for name in classes.own_names(base):
            member = classes.member(info, name)
            if member is not None and member.owner is base and member.unit is not None and is_abstract(member.unit):
                found.append(member)
    return found


def served_by_metaclass(classes: Classes, info: ClassInfo) -> str:
    """Why any attribute may exist on the class itself: its metaclass makes them. Empty when it does not."""
    for klass in classes.lineage(info).classes:
        for keyword in getattr(classes.header(klass), "keywords", []):
            symbol = classes.resolve(klass, keyword.value) if keyword.arg == "metaclass" else None
            meta = symbol.klass if symbol is not None else None
            if meta is not None and any(classes.member(meta, n) for n in ("__getattr__", "__getattribute__")):
                return "metaclass %s makes attributes at run time" % meta.name
    return ""

"""Parameters of a callable and the binding of a call's arguments to them, as ``inspect.Signature.bind`` does it."""

from __future__ import annotations

import ast
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

POSITIONAL_ONLY = "positional-only"
POSITIONAL = "positional"
VAR_POSITIONAL = "*"
KEYWORD_ONLY = "keyword-only"
VAR_KEYWORD = "**"


class Parameter(NamedTuple):
    """``default`` is the source of the default (None: required); ``extra`` marks a field that is not an attribute."""

    name: str
    kind: str
    default: Optional[str] = None
    annotation: Optional[ast.expr] = None
    line: int = 0
    default_node: Optional[ast.expr] = None
    extra: str = ""

    @property
    def required(self) -> bool:
        return self.default is None and self.kind not in (VAR_POSITIONAL, VAR_KEYWORD)

    def text(self) -> str:
        stars = self.kind if self.kind in (VAR_POSITIONAL, VAR_KEYWORD) else ""
        annotation = ": " + unparse(self.annotation) if self.annotation is not None else ""
        default = ""
        if self.default is not None and not stars:
            default = (" = " if annotation else "=") + self.default
        return stars + self.name + annotation + default


class Signature(NamedTuple):
    """``doubt`` says why the parameters may be others (an unknown decorator or base), if so; ``ignores_unknown``:
    extra keywords are dropped.
    """

    parameters: Tuple[Parameter, ...]
    doubt: str = ""
    ignores_unknown: bool = False
    drops_unknown: bool = False
    error: str = "TypeError"

    def without_first(self) -> Signature:
        """As seen through an instance: the first positional parameter is bound."""
        first = self.parameters[:1]
        if first and first[0].kind in (POSITIONAL, POSITIONAL_ONLY):
            return self._replace(parameters=self.parameters[1:])
        return self

    def get(self, name: str) -> Optional[Parameter]:
        return next((p for p in self.parameters if p.name == name), None)

    def text(self) -> str:
        parts: List[str] = []
        seen_star = seen_slash = False
        for number, parameter in enumerate(self.parameters):
            if parameter.kind == KEYWORD_ONLY and not seen_star:
                parts.append("*")
                seen_star = True
            if parameter.kind == VAR_POSITIONAL:
                seen_star = True
            if (
                parameter.kind != POSITIONAL_ONLY
                and not seen_slash
                and number
                and self.parameters[number - 1].kind == POSITIONAL_ONLY
            ):
                parts.append("/")
                seen_slash = True
            parts.append(parameter.text())
        if self.parameters and self.parameters[-1].kind == POSITIONAL_ONLY:
            parts.append("/")
        return "(" + ", ".join(parts) + ")"


class Arguments(NamedTuple):
    """A call: number of plain positional arguments, keyword names, and whether ``*x`` or ``**x`` of unknown
    content is passed. ``maybe``: keywords that only some ways through the code pass.
    """

    positional: int
    keywords: Tuple[str, ...]
    star: bool = False
    double_star: bool = False
    maybe: Tuple[str, ...] = ()


class Problem(NamedTuple):
    """``kind`` is unknown-kwarg, missing-required, too-many-positional or repeated; ``name`` the parameter."""

    kind: str
    name: str


class Outcome(NamedTuple):
    """``problems`` are sure; ``open`` is true when ``*x``/``**x`` hide whether the rest binds."""

    problems: Tuple[Problem, ...]
    open: bool
    bound: Dict[str, int]

    @property
    def fits(self) -> bool:
        return not self.problems


def unparse(node: Optional[ast.AST]) -> str:
    """Source text of a tree on one line; bounded."""
    if node is None:
        return ""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "..."
    return text if len(text) <= 200 else text[:197] + "..."


def from_arguments(arguments: ast.arguments) -> Signature:
    """The signature that a ``def`` or ``lambda`` spells out."""
    parameters: List[Parameter] = []
    plain = list(arguments.posonlyargs) + list(arguments.args)
    defaults: List[Optional[ast.expr]] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for number, (argument, default) in enumerate(zip(plain, defaults)):
        kind = POSITIONAL_ONLY if number < len(arguments.posonlyargs) else POSITIONAL
        parameters.append(_parameter(argument, kind, default))
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg, VAR_POSITIONAL, None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        parameters.append(_parameter(argument, KEYWORD_ONLY, default))
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg, VAR_KEYWORD, None))
    return Signature(tuple(parameters))


def _parameter(argument: ast.arg, kind: str, default: Optional[ast.expr]) -> Parameter:
    return Parameter(
        argument.arg, kind, None if default is None else unparse(default), argument.annotation, argument.lineno, default
    )


def bind(signature: Signature, call: Arguments) -> Outcome:
    """Binds a call. A problem is reported only if it holds whatever ``*x`` and ``**x`` contain."""
    problems: List[Problem] = []
    bound: Dict[str, int] = {}
    places = [p for p in signature.parameters if p.kind in (POSITIONAL_ONLY, POSITIONAL)]
    takes_more = any(p.kind == VAR_POSITIONAL for p in signature.parameters)
    takes_any = any(p.kind == VAR_KEYWORD for p in signature.parameters)
    for number, parameter in enumerate(places[: call.positional]):
        bound[parameter.name] = number
    if call.positional > len(places) and not takes_more:
        problems.append(Problem("too-many-positional", str(len(places))))
    named = {p.name: p for p in signature.parameters if p.kind in (POSITIONAL, KEYWORD_ONLY)}
    for keyword in call.keywords:
        if keyword in named:
            if keyword in bound:
                problems.append(Problem("repeated", keyword))
            bound.setdefault(keyword, -1)
        elif not takes_any and not signature.ignores_unknown:
            problems.append(Problem("unknown-kwarg", keyword))
    hidden = False
    for parameter in signature.parameters:
        if not parameter.required or parameter.name in bound:
            continue
        by_position = parameter.kind in (POSITIONAL_ONLY, POSITIONAL) and call.star
        by_name = parameter.kind in (POSITIONAL, KEYWORD_ONLY) and call.double_star
        if by_position or by_name:
            hidden = True
        else:
            problems.append(Problem("missing-required", parameter.name))
    if call.double_star and not takes_any and not signature.ignores_unknown:
        hidden = True
    if call.star and not takes_more:
        hidden = True
    return Outcome(tuple(problems), hidden, bound)


def bind_ways(signature: Signature, call: Arguments) -> Tuple[Outcome, bool]:
    """Binds a call with and without what it may pass. The second: whether the outcome is the same either way."""
    least = bind(signature, call._replace(maybe=()))
    if not call.maybe:
        return least, True
    most = bind(signature, call._replace(keywords=call.keywords + call.maybe, maybe=()))
    common = tuple(p for p in least.problems if p in most.problems)
    if common:
        return least._replace(problems=common), True
    return (most if least.fits else least), least.fits and most.fits


def arguments_of(call: ast.Call) -> Arguments:
    """The shape of a call; literal ``*(a, b)`` and ``**{"k": v}`` are spelled out."""
    positional, star = 0, False
    for argument in call.args:
        if isinstance(argument, ast.Starred):
            if isinstance(argument.value, (ast.Tuple, ast.List)) and not any(
                isinstance(e, ast.Starred) for e in argument.value.elts
            ):
                positional += len(argument.value.elts)
            else:
                star = True
        elif not star:
            positional += 1
        else:
            positional += 0  # behind a *x of unknown length its place is not known
    keywords: List[str] = []
    double = False
    for keyword in call.keywords:
        if keyword.arg is not None:
            keywords.append(keyword.arg)
        elif isinstance(keyword.value, ast.Dict) and all(
            isinstance(k, ast.Constant) and isinstance(k.value, str) for k in keyword.value.keys
        ):
            keywords.extend(str(k.value) for k in keyword.value.keys if isinstance(k, ast.Constant))
        else:
            double = True
    return Arguments(positional, tuple(keywords), star, double)


def merge_overloads(signatures: Sequence[Signature], call: Arguments) -> Outcome:
    """The outcome of the first overload that fits, else that of the last."""
    outcome = bind(signatures[-1], call)
    for signature in signatures:
        tried = bind(signature, call)
        if tried.fits:
            return tried
    return outcome

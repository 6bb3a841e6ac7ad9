"""Contracts: known changes of meaning that no signature shows, as data, decided on two source trees.

A contract says how the consumer uses the provider (``uses``, ``absent``), what the provider's sources look like where
the change is in (``shape``), and what follows. This module knows the vocabulary, which docs/audit.md explains, and no
library. Every predicate has three values; a contract that the sources neither confirm nor exclude is undecided.
"""

from __future__ import annotations

import ast
import re
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from remoteops.agent.audit import patterns, shell
from remoteops.agent.audit.shapes import Provider
from remoteops.agent.audit.usage import Consumer, Use

Contract = Dict[str, Any]
Finding = Dict[str, Any]


class Verdict(NamedTuple):
    """True, False or None (unknown, with the reason); ``model`` says that the model's class would decide it."""

    value: Optional[bool]
    reason: str = ""
    model: bool = False


YES = Verdict(True)
NO = Verdict(False)


class ContractError(ValueError):
    """A contract that does not speak the vocabulary; the message names contract and key."""


def evaluate(
    contracts: List[Contract], provider: Provider, consumer: Consumer, model: Optional[str] = None
) -> Tuple[List[Finding], List[Dict[str, Any]]]:
    """Findings of all contracts that apply, and a record for each that stays undecided.

    Contracts about another provider are passed over. Raises ContractError for one that is malformed.
    """
    findings: List[Finding] = []
    undecided: List[Dict[str, Any]] = []
    for contract in contracts:
        if contract.get("provider") not in (None, provider.package):
            continue
        try:
            found, open_questions = _Judge(contract, provider, consumer, model).judge()
        except (KeyError, TypeError, AttributeError, patterns.PatternError, re.error) as error:
            raise ContractError("contract %s: %s: %s" % (contract.get("id"), type(error).__name__, error)) from error
        findings += found
        undecided += open_questions
    return findings, undecided


class _Judge:
    """One contract against one pair of trees."""

    def __init__(self, contract: Contract, provider: Provider, consumer: Consumer, model: Optional[str]) -> None:
        self.contract = contract
        self.provider = provider
        self.consumer = consumer
        self.model = model
        self.anchor = contract.get("anchor") or next(iter(contract["uses"]))

    def judge(self) -> Tuple[List[Finding], List[Dict[str, Any]]]:
        if self.contract.get("needs_model") and self.model is None:
            return [], []
        queries: Dict[str, Dict[str, Any]] = self.contract["uses"]
        near = any("same" in query for query in queries.values())
        uses: Dict[str, List[Use]] = {}
        only: Optional[Set[str]] = None
        # Calls are resolved already and cost nothing, patterns need a file's tree: most contracts end at a call.
        for name in sorted(queries, key=lambda name: "call" not in queries[name]):
            uses[name] = list(self.consumer.find(queries[name], self.provider, only))
            if not uses[name] and not queries[name].get("optional"):
                return [], []
            if near:
                only = {use.file for use in uses[name]} if only is None else only & {use.file for use in uses[name]}
        if not uses[self.anchor]:  # optional and not there: what is there takes its place
            self.anchor = next(name for name in queries if uses[name])
        findings, undecided = [], []
        for use in uses[self.anchor]:
            chosen = self._choose(use, uses)
            if chosen is None or any(
                self.consumer.present(query, use, self.provider) for query in self.contract.get("absent", [])
            ):
                continue
            verdict = _all(
                [Verdict(None, one.doubt) for one in chosen.values() if one is not None and one.doubt]
                + [self.shape(self.contract["shape"], chosen)]
            )
            if verdict.value is False:
                continue
            if verdict.value is None and not verdict.model:
                undecided.append(self._open(use, verdict.reason))
                continue
            outcome = self._case(chosen)
            if outcome is None:
                undecided.append(self._open(use, "no case of the contract fits"))
            elif not outcome.get("excluded"):
                if verdict.value is None:
                    outcome = {
                        **outcome,
                        "confidence": "risk",
                        "detail": outcome.get("undecided_detail")
                        or self.contract["shape"].get("undecided_detail")
                        or outcome["detail"],
                    }
                findings.append(self._finding(outcome, chosen))
        return findings, undecided

    def _choose(self, anchor: Use, uses: Dict[str, List[Use]]) -> Optional[Dict[str, Optional[Use]]]:
        """For one use of the anchor the first of each other use; near it where ``same`` says so."""
        chosen: Dict[str, Optional[Use]] = {}
        for name, found in uses.items():
            query = self.contract["uses"][name]
            if name == self.anchor:
                found = [anchor]
            elif "same" in query:
                found = [use for use in found if self.consumer.together(anchor, use, query["same"])]
            if not found and not query.get("optional"):
                return None
            chosen[name] = found[0] if found else None
        return chosen

    def _case(self, chosen: Dict[str, Optional[Use]]) -> Optional[Contract]:
        """The contract with the fields of the first case that fits, or None; without cases the contract itself."""
        cases = self.contract.get("cases")
        if not cases:
            return self.contract
        for case in cases:
            if "if" not in case or self.shape(case["if"], chosen).value:
                return {**self.contract, **{key: value for key, value in case.items() if key != "if"}}
        return None

    # -- predicates on the provider ------------------------------------------------------------------------------

    def shape(self, predicate: Dict[str, Any], chosen: Dict[str, Optional[Use]]) -> Verdict:
        if "all" in predicate:
            return _all([self.shape(one, chosen) for one in predicate["all"]])
        if "any" in predicate:
            return _not(_all([_not(self.shape(one, chosen)) for one in predicate["any"]]))
        if "not" in predicate:
            return _not(self.shape(predicate["not"], chosen))
        if "exists" in predicate:
            names = predicate["exists"] if isinstance(predicate["exists"], list) else [predicate["exists"]]
            return _not(_all([_not(Verdict(*self.provider.exists(self._name(name, chosen)))) for name in names]))
        if "parameter" in predicate:
            return self._parameter(predicate, chosen)
        if "body" in predicate or ("under" in predicate and "has_text" in predicate):
            return self._body(predicate, chosen)
        if "consumer" in predicate:
            return Verdict(next(self.consumer.find(predicate["consumer"], self.provider), None) is not None)
        if "model_not_in" in predicate:
            return self._model_not_in(predicate, chosen)
        if "model_lacks_base" in predicate:
            return self._model_lacks_base(predicate)
        if "model_lacks_attribute" in predicate:
            return self._model_lacks_attribute(predicate)
        raise KeyError("shape knows no predicate %s" % sorted(predicate))

    def _parameter(self, predicate: Dict[str, Any], chosen: Dict[str, Optional[Use]]) -> Verdict:
        """Whether a callable or class takes a parameter, and (``default``) whether its default is one of some texts."""
        target = self._name(predicate["parameter"], chosen)
        parameters = self.provider.parameters(target)
        if parameters is None:
            return Verdict(None, "the signature of %s cannot be read" % target)
        if predicate["name"] not in parameters:
            return NO
        if "default" not in predicate:
            return YES
        default = parameters[predicate["name"]]
        return Verdict(default is not None and _normal(default) in [_normal(text) for text in predicate["default"]])

    def _body(self, predicate: Dict[str, Any], chosen: Dict[str, Optional[Use]]) -> Verdict:
        """Whether a definition (or, with ``under``, any file of a package) holds a pattern or a text."""
        if "under" in predicate:
            return Verdict(self.provider.mentions(predicate["under"], predicate["has_text"]))
        name = self._name(predicate["body"], chosen)
        found = self.provider.definition(name)
        if found is None:
            return NO if predicate.get("missing") is False else Verdict(None, "%s is not in the provider" % name)
        if "has_text" in predicate:
            return Verdict(re.search(predicate["has_text"], found.text) is not None)
        if patterns.needle(predicate["has"]) not in found.text:
            return NO
        node = found.node
        if node is None:
            return Verdict(None, "%s cannot be parsed (%s:%d)" % (name, found.path, found.line))
        return Verdict(next(patterns.find(predicate["has"], node), None) is not None)

    def _model_not_in(self, predicate: Dict[str, Any], chosen: Dict[str, Optional[Use]]) -> Verdict:
        found = self.provider.definition(self._name(predicate["model_not_in"], chosen))
        if found is None:
            return Verdict(None, "%s is not in the provider" % predicate["model_not_in"])
        if self.model is None:
            return Verdict(None, "it depends on the model", model=True)
        return Verdict(re.search(r"[\"']%s[\"']" % re.escape(self.model), found.text) is None)

    def _model_lacks_base(self, predicate: Dict[str, Any]) -> Verdict:
        if self.model is None:
            return Verdict(None, "it depends on the model", model=True)
        bases = self.provider.bases_of_class_under(predicate["under"], self.model)
        if bases is None:
            return Verdict(None, "no class %s under %s" % (self.model, predicate["under"]), model=True)
        return Verdict(predicate["model_lacks_base"] not in bases)

    def _model_lacks_attribute(self, predicate: Dict[str, Any]) -> Verdict:
        if self.model is None:
            return Verdict(None, "it depends on the model", model=True)
        found, why = self.provider.class_has(predicate["under"], self.model, predicate["model_lacks_attribute"])
        return _not(Verdict(found, why, model=found is None))

    # -- findings --------------------------------------------------------------------------------------------------

    def _name(self, template: str, chosen: Dict[str, Optional[Use]]) -> str:
        """``{use}`` is what the consumer reaches, ``{use.target}`` where it is defined, ``{use.class}`` its class."""

        def fill(match: re.Match[str]) -> str:
            name, _, part = match.group(1).partition(".")
            use = chosen[name]
            if use is None:
                raise KeyError("use %s is optional and not there" % name)
            if part == "target":
                return use.target or use.symbol
            return use.symbol.rpartition(".")[0] if part == "class" else use.symbol

        return re.sub(r"\{(\w+(?:\.\w+)?)\}", fill, template)

    def _finding(self, outcome: Contract, chosen: Dict[str, Optional[Use]]) -> Finding:
        use = chosen[outcome.get("anchor") or self.anchor]
        if use is None:  # the anchor is optional and absent: the contract's first use stands in
            use = next(one for one in chosen.values() if one is not None)
        source = outcome.get("now_from")
        place = self.provider.definition(self._name(source, chosen)) if source else None
        fields = {
            "rule": outcome["id"],
            "kind": outcome.get("kind", "behaviour"),
            "confidence": outcome.get("confidence", "contract"),
            "symbol": self._name(outcome["symbol"], chosen),
            "detail": outcome["detail"],
            "when": outcome["when"],
            "error": outcome["error"],
            "was": outcome.get("was") or None,
            "now": outcome.get("now") or (place.text.strip().splitlines()[0] if place else None),
            "now_at": "%s:%d" % (place.path, place.line) if place else None,
            "fix": outcome.get("fix"),
            "contract": outcome["id"],
        }
        return self.consumer.finding(use, **fields, check=shell.one_line(fields, self.provider.tree.path))

    def _open(self, use: Use, reason: str) -> Dict[str, Any]:
        return {
            "file": use.file,
            "line": use.line,
            "symbol": use.symbol,
            "contract": self.contract["id"],
            "reason": "contract %s undecided: %s" % (self.contract["id"], reason),
        }


def _all(verdicts: List[Verdict]) -> Verdict:
    """False beats unknown beats true; an unknown that a model would settle yields to one that it would not."""
    if any(verdict.value is False for verdict in verdicts):
        return NO
    unknown = sorted((verdict for verdict in verdicts if verdict.value is None), key=lambda verdict: verdict.model)
    return unknown[0] if unknown else YES


def _not(verdict: Verdict) -> Verdict:
    return verdict if verdict.value is None else Verdict(not verdict.value)


def _normal(text: str) -> str:
    """An expression in one spelling (quotes, spaces)."""
    try:
        return ast.dump(ast.parse(text.strip(), mode="eval"))
    except SyntaxError:
        return text.strip()

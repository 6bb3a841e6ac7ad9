"""What the installed provider and consumer can do for an extraction, read from the shape of their sources (nothing is
imported).

Never from a version number: a nightly that calls itself 0.16 may have what release 0.16 has not. An answer is True,
False, or None when the sources do not say.
"""

from __future__ import annotations

import ast
import os
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from remoteops.agent.protocol import AgentError

CONNECTOR = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
METHOD = "extract_hidden_states"
GENERATOR = "data_generation/vllm_hidden_states_generator.py"
MODELS = "model_executor/models"
AUX = ("aux_hidden_state_layers", "_maybe_add_hidden_state")


class Capabilities(NamedTuple):
    """``connector``: vLLM has the hidden-states connector and its extract method; ``last_layer``: this model's code
    captures id N; ``first_layer``: id 0 (the embeddings); ``tensor_parallel``: the connector reports finished requests
    under TP > 1; ``generator``: speculators has its own generator; ``architecture``: vLLM's registry names the model's
    architecture."""

    connector: Optional[bool]
    last_layer: Optional[bool]
    tensor_parallel: Optional[bool]
    generator: Optional[bool]
    architecture: Optional[bool]
    first_layer: Optional[bool] = None


def look(provider: Optional[str], consumer: Optional[str], architecture: str) -> Capabilities:
    """Look at package folders (None: not installed). Never raises: what cannot be read is None."""
    generator = os.path.isfile(os.path.join(consumer, GENERATOR)) if consumer else False
    if not provider:
        return Capabilities(False, None, None, generator, None)
    connector_text = _text(os.path.join(provider, CONNECTOR))
    method = os.path.isfile(os.path.join(provider, "v1", "spec_decode", METHOD + ".py")) or os.path.isfile(
        os.path.join(provider, MODELS, METHOD + ".py")
    )
    connector = bool(connector_text) and method
    registry = registered(provider)
    known = None if registry is None or not architecture else architecture in registry
    last = _ask(provider, architecture, registry, _gives_last) if known and registry else None
    first = _ask(provider, architecture, registry, _gives_first) if known and registry else None
    # Releases before the asynchronous writer finish inside the step and have nothing to report.
    asynchronous = "flock" in connector_text or ".lock" in connector_text
    parallel = (not asynchronous or "get_finished_count" in connector_text) if connector_text else None
    return Capabilities(connector, last, parallel, generator, known, first)


def registered(provider: str) -> Optional[Dict[str, Tuple[str, str]]]:
    """architecture -> (module, class) of vLLM's model registry; None when it has another shape than known."""
    tree = _tree(os.path.join(provider, MODELS, "registry.py"))
    if tree is None:
        return None
    found: Dict[str, Tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if (
                    isinstance(key, ast.Constant)
                    and isinstance(key.value, str)
                    and isinstance(value, ast.Tuple)
                    and len(value.elts) == 2
                ):
                    parts = [one.value for one in value.elts if isinstance(one, ast.Constant)]
                    if len(parts) == 2:
                        found[key.value] = (str(parts[0]), str(parts[1]))
    return found or None


def _ask(
    provider: str,
    architecture: str,
    registry: Mapping[str, Tuple[str, str]],
    judge: Callable[[ast.Module], Optional[bool]],
) -> Optional[bool]:
    """What ``judge`` says of vLLM's code for this architecture; None when nothing there captures states.

    A wrapper (Kimi-K2.5 around DeepSeek) is followed to the architectures it names in text and the model modules it
    imports.
    """
    return _follow(provider, registry[architecture][0], registry, set(), judge)


def _gives_last(tree: ast.Module) -> Optional[bool]:
    """Is the state after the last layer (id N) captured?"""
    captures = False
    for node in ast.walk(tree):
        if _is_helper(node):
            captures = True
            if _adds_to_the_number(node):
                return True
        if _asks_layers(node):
            captures = True
            text = ast.dump(node.left)  # type: ignore[attr-defined]
            if "end_layer" in text or "num_hidden_layers" in text or "Add()" in text or "'len'" in text:
                return True
    return False if captures else None


def _gives_first(tree: ast.Module) -> Optional[bool]:
    """Can id 0 be captured? Before the first layer there is no residual: code that adds one all the same fails."""
    answers = []
    for node in ast.walk(tree):
        if _is_helper(node):
            answers.append(not _adds_to_the_number(node))
        if isinstance(node, ast.If) and any(_asks_layers(one) for one in ast.walk(node.test)):
            guarded = {id(one) for inner in ast.walk(node) if isinstance(inner, ast.IfExp) for one in ast.walk(inner)}
            if not any(_asks_for(node.test, word) for word in ("end_layer", "num_hidden_layers")):
                answers.append(not any(_adds_residual(one) and id(one) not in guarded for one in ast.walk(node)))
    return any(answers) if answers else None


def _is_helper(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "_maybe_add_hidden_state"
    )


def _adds_to_the_number(call: ast.AST) -> bool:
    """``idx + 1``: the state behind a layer; without it the one before the first."""
    return any(isinstance(one, ast.BinOp) and isinstance(one.op, ast.Add) for one in getattr(call, "args", ()))


def _asks_layers(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and any(
        isinstance(one, ast.Attribute) and one.attr == "aux_hidden_state_layers" for one in node.comparators
    )


def _asks_for(test: ast.AST, word: str) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == word for one in ast.walk(test))


def _adds_residual(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and any(isinstance(one, ast.Name) and one.id == "residual" for one in (node.left, node.right))
    )


def _follow(
    provider: str,
    module: str,
    registry: Mapping[str, Tuple[str, str]],
    seen: set[str],
    judge: Callable[[ast.Module], Optional[bool]],
) -> Optional[bool]:
    if module in seen or len(seen) > 12:
        return None
    seen.add(module)
    tree = _tree(os.path.join(provider, MODELS, module.lstrip(".").replace(".", os.sep) + ".py"))
    if tree is None:
        return None
    answer = judge(tree)
    if answer is not None:
        return answer
    named = [
        registry[node.value][0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in registry
    ]
    for modules in (named, list(_siblings(tree))):
        told = (_follow(provider, name, registry, seen, judge) for name in modules)
        answers = [one for one in told if one is not None]
        if answers:
            return answers[0] if len(set(answers)) == 1 else None
    return None


def choose(
    requested: str,
    found: Capabilities,
    *,
    breaks: Optional[int],
    tensor_parallel: int,
    layers: Sequence[int],
    num_layers: int,
    force: bool = False,
) -> Tuple[str, List[str]]:
    """The engine for a run and why, in words: (engine, reasons). A pure function of what was found.

    ``breaks``: how many of the audit's findings stop the generator (None: not audited). ``auto`` prefers the
    connector, which vLLM maintains and which needs no patch; it takes the generator when the connector is missing, or
    does not capture an id that was asked for, or cannot run this TP. Raises AgentError: UsageError for an unknown
    name, AuditBroken when only the generator is left and the audit found breaks or when the connector is named and
    cannot do it (not with ``force``), MissingPackage when there is no engine at all. Else a named engine is taken as
    named, with the reasons that speak against it.
    """
    against = []
    if found.connector is not True:
        against.append(
            "this vLLM has no hidden-states connector"
            if found.connector is False
            else "it cannot be seen whether this vLLM has the hidden-states connector"
        )
    if num_layers in layers and found.last_layer is False:
        against.append("this vLLM's code for the model does not capture the last state (id %d)" % num_layers)
    if 0 in layers and found.first_layer is False:
        against.append("this vLLM's code for the model cannot give the embeddings (id 0)")
    if requested in ("generator", "generator-stock", "connector"):
        if requested == "connector":
            sure = found.connector is False or len(against) > (found.connector is not True)
            if sure and not force:
                raise AgentError(
                    "AuditBroken",
                    "the connector would fail after the model is loaded: %s" % "; ".join(against),
                    tried="--engine connector",
                    hint="other --layers, or --engine auto; --force starts it all the same",
                )
            return requested, ["--engine connector", *against]
        if found.generator is False:
            raise AgentError(
                "MissingPackage",
                "speculators on that host has no generator of its own",
                tried="--engine %s" % requested,
                hint="releases after 0.4 extract through vLLM's connector: --engine connector",
            )
        return requested, ["--engine %s" % requested]
    if requested != "auto":
        raise AgentError(
            "UsageError", "no engine %r" % requested, hint="engines: auto, connector, generator, generator-stock"
        )
    doubts = []
    if num_layers in layers and found.last_layer is None:
        doubts.append("it cannot be read whether this vLLM's code for the model captures id %d" % num_layers)
    if tensor_parallel > 1 and found.tensor_parallel is False:
        # Ours waits for the ranks itself, but that has been shown on fewer hosts than the generator has.
        doubts.append("this vLLM's own connector does not count its ranks under tensor parallel %d" % tensor_parallel)
    if not against and not (doubts and found.generator and not breaks):
        return "connector", doubts or ["vLLM's own connector captures every id asked for"]
    if found.generator:
        if breaks:
            raise AgentError(
                "AuditBroken",
                "%d breaks between speculators and vLLM stop the generator, and the connector will not do: %s"
                % (breaks, "; ".join([*against, *doubts])),
                tried="--engine auto",
                hint="fab patch mends them (or fab extract --patch does both)",
            )
        return "generator", [*against, *doubts]
    raise AgentError(
        "MissingPackage",
        "no engine can run there: " + "; ".join([*against, "speculators has no generator of its own"]),
        tried="--engine auto",
        hint="a vLLM whose connector fits (0.18 or newer; DeepSeek and Kimi models 0.25), or speculators <= 0.4",
    )


def as_dict(found: Capabilities) -> Dict[str, Optional[bool]]:
    return dict(found._asdict())


def from_dict(record: Mapping[str, Any]) -> Capabilities:
    return Capabilities(*(record.get(name) for name in Capabilities._fields))


def _siblings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            name = node.module.rsplit(".", 1)[-1]
            if (node.level == 1 and "." not in node.module) or node.module.startswith("vllm.model_executor.models."):
                if name not in ("interfaces", "utils", "interfaces_base", "vision", "adapters", "registry"):
                    yield name


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def _tree(path: str) -> Optional[ast.Module]:
    try:
        return ast.parse(_text(path)) if os.path.isfile(path) else None
    except (SyntaxError, ValueError):
        return None

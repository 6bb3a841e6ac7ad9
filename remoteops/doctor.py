"""`fab doctor`: each layer between the operator and a run, in order; the first that fails ends it, with what to do.

Layers: route (inventory and ssh_config), link (name, TCP, host key, login), agent (interpreter, state folder), venv,
packages, GPUs, and the workload's own preflight. Nothing is changed on the host but the agent archive in its cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from remoteops.errors import RemoteOpsError
from remoteops.inventory import Host
from remoteops.remote import Agent
from remoteops.transport import connect

Layer = dict[str, Any]
_GIB = float(1 << 30)


def examine(host: Host) -> dict[str, Any]:
    """Document remoteops.doctor/1: {"host", "layers": [{"layer", "state", "found", "hint"}], "exit_code"}.

    ``state`` is ok, warning, failed or skipped; the workload's own checks have "of": "workload". Raises nothing for
    what is wrong with the host; that is the result.
    """
    with contextlib.ExitStack() as opened:
        check = _Examination(host, opened)
        for layer in (check.route, check.link, check.agent, check.venv, check.packages, check.gpus, check.workload):
            check.run(layer)
    return {
        "schema": "remoteops.doctor/1",
        "host": host.name,
        "layers": check.layers,
        "exit_code": check.exit_code,
    }


class _Examination:
    """The layers found so far; a layer after a failed one is skipped."""

    def __init__(self, host: Host, opened: contextlib.ExitStack) -> None:
        self.host = host
        self.layers: list[Layer] = []
        self.exit_code = 0
        self._open = opened
        self._agent: Agent | None = None
        self._facts: dict[str, Any] = {}

    def run(self, layer: Callable[[], None]) -> None:
        name = layer.__name__
        if self.exit_code:
            self._add(name, "skipped", "")
            return
        try:
            layer()
        except RemoteOpsError as error:
            self._fail(name, error.message + (f" (tried: {error.tried})" if error.tried else ""), error.hint)
            self.exit_code = error.exit_code

    def _add(self, layer: str, state: str, found: str, hint: str = "", **more: str) -> None:
        self.layers.append({"layer": layer, "state": state, "found": found, "hint": hint, **more})

    def _fail(self, layer: str, found: str, hint: str, **more: str) -> None:
        self._add(layer, "failed", found, hint, **more)
        self.exit_code = 1

    # -- the layers -------------------------------------------------------------------------------------------------

    def route(self) -> None:
        from remoteops.hosts import describe_one

        entry = describe_one(self.host)
        through = f" through {entry['jump']}" if entry["jump"] else ""
        notices = "; ".join(entry["notices"])
        self._add("route", "warning" if notices else "ok", f"{entry['target']}{through}", notices)

    def link(self) -> None:
        link = self._open.enter_context(connect(self.host))
        self._agent = Agent(link)
        self._add("link", "ok", link.description)

    def agent(self) -> None:
        assert self._agent is not None
        self._facts = self._agent.call("facts", {"venv": self.host.venv, "state_dir": self.host.state_dir})
        facts = self._facts
        stuck = [disk for disk in facts["disks"] if disk.get("error") or not disk.get("writable")]
        if stuck:
            what = stuck[0].get("error") or ("read-only" if stuck[0].get("read_only") else "not writable")
            self._fail("agent", f"{stuck[0]['path']}: {what}", "set state_dir and cache_dir in the inventory")
            return
        self._add(
            "agent", "ok", f"Python {facts['python']} ({facts['executable']}) as {facts['user']} on {facts['host']}"
        )

    def venv(self) -> None:
        found = self._facts.get("venv") or {}
        if not found.get("path"):
            self._fail("venv", "the inventory names none", f"set `venv:` of {self.host.name} to the one with vLLM")
        elif found.get("error"):
            self._fail("venv", f"{found['path']}: {found['error']}", f"correct `venv:` of {self.host.name}")
        else:
            self._add("venv", "ok", f"{found['path']} (Python {found.get('version') or 'unknown'})")

    def packages(self) -> None:
        packages = self._facts["venv"].get("packages", {})
        work = self.host.workload
        named = {name: _version(packages, name) for name in (work.provider, work.consumer, "torch", "transformers")}
        missing = [name for name in (work.provider, "torch", "transformers") if named[name] is None]
        text = ", ".join(f"{name} {version}" for name, version in named.items() if version)
        if missing:
            hint = f"{self.host.venv}/bin/pip install {' '.join(missing)}"
            self._fail("packages", f"not installed: {', '.join(missing)}" + (f"; found {text}" if text else ""), hint)
        else:
            self._add("packages", "ok", text, "" if named[work.consumer] else f"{work.consumer} is not installed")

    def gpus(self) -> None:
        gpus = self._facts.get("gpus") or {}
        cards = gpus.get("cards") or []
        if not cards:
            self._add("gpus", "warning", str(gpus.get("error") or "none"), "without GPUs only a CPU build of vLLM runs")
            return
        busy = [card for card in cards if (card.get("memory_used") or 0) > 0.05 * (card.get("memory_total") or 1)]
        memory = (cards[0].get("memory_total") or 0) / _GIB
        text = f"{len(cards)} x {cards[0].get('name')}, {memory:.0f} GiB each"
        used = ", ".join(f"GPU {card['index']}: {(card.get('memory_used') or 0) / _GIB:.1f} GiB" for card in busy)
        self._add("gpus", "warning" if busy else "ok", text, f"in use already: {used}" if busy else "")

    def workload(self) -> None:
        work = self.host.workload
        if not work.model or not work.dataset:
            self._add("workload", "skipped", "the inventory names no model or no dataset")
            return
        assert self._agent is not None
        from remoteops import extract

        found = extract.check(self.host, self._agent)
        for item in found["checks"]:
            name, told = item["name"], item["found"]
            if item["ok"] is False:
                self._fail(name, f"{told} (needed: {item['need']})", item["hint"], of="workload")
            elif item["ok"] is None:
                self._add(name, "warning", told, item["hint"], of="workload")
            else:
                self._add(name, "ok", told, of="workload")


def _version(packages: dict[str, str], name: str) -> str | None:
    """The version under a package's own name or under that of its CPU build."""
    return packages.get(name) or packages.get(f"{name}-cpu") or packages.get(f"{name}_cpu")

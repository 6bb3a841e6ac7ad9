"""One question to many hosts at once: nobody waits for a slow one, nobody's answer gets lost.

    outcomes = each(hosts, lambda host: probe(host))

An sshd that drops logins (MaxStartups) is asked again by transport.connect, with pauses of random length.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from remoteops.errors import RemoteOpsError
from remoteops.transport import Completed, close_links_of, connect

if TYPE_CHECKING:
    from remoteops.console import Console

CAP = 64  # hosts asked at the same time; a thread each, most of them waiting
View = Callable[["Console", Any], "int | None"]


@dataclass(frozen=True)
class Outcome:
    """What one host answered: ``value``, or ``error``; ``seconds`` it took."""

    host: Any
    value: Any
    error: RemoteOpsError | None
    seconds: float

    @property
    def name(self) -> str:
        return str(self.host.name)


def each(
    hosts: Iterable[Any],
    function: Callable[[Any], Any],
    *,
    cap: int = CAP,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Call ``function(host)`` for every host, at most ``cap`` at a time; the outcomes come back in the hosts' order.

    A host named twice is asked twice and has two outcomes. An error of one host is kept as its outcome and stops nobody
    else. ``on_outcome`` is called in this thread as hosts finish. Ctrl-C closes the links that are open for this, and
    raises KeyboardInterrupt at once.
    """
    todo: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
    everyone = list(hosts)
    for index, host in enumerate(everyone):
        todo.put((index, host))
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                index, host = todo.get_nowait()
            except Empty:
                return
            done.put((index, _ask(host, function)))

    threads = [
        threading.Thread(target=work, name=f"remoteops-fleet-{number}", daemon=True)
        for number in range(min(max(1, cap), len(everyone)))
    ]
    outcomes: dict[int, Outcome] = {}
    try:
        for thread in threads:
            thread.start()
        while len(outcomes) < len(everyone):
            index, outcome = done.get()
            outcomes[index] = outcome
            if on_outcome is not None:
                on_outcome(outcome)
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        close_links_of({thread.ident for thread in threads if thread.ident is not None})
        raise
    return [outcomes[index] for index in range(len(everyone))]


def _ask(host: Any, function: Callable[[Any], Any]) -> Outcome:
    started = time.monotonic()
    value: Any = None
    error: RemoteOpsError | None = None
    try:
        value = function(host)
    except RemoteOpsError as caught:
        error = caught
        error.host = error.host or host.name
    except Exception as caught:  # noqa: BLE001 - a defect at one host must not take the answers of the others away
        import traceback

        error = RemoteOpsError(
            f"a defect of remoteops: {type(caught).__name__}: {caught}",
            host=host.name,
            hint="please report it with the traceback in data (--json)",
            traceback=traceback.format_exc(),
        )
    return Outcome(host, value, error, time.monotonic() - started)


def show(console: Console, outcomes: Sequence[Outcome], view: View) -> int:
    """Show each host's outcome with ``view`` and a last line that names those that failed; gives the worst exit code.

    With --json: one document {"schema": "remoteops.fleet/1", "hosts": [{"host", "exit_code", "result" | "error"}]}.
    """
    codes: list[int] = []
    entries: list[dict[str, Any]] = []
    for outcome in outcomes:
        collector = _collector() if console.json else None
        if collector is None:
            console.say(f"── {outcome.name} ".ljust(60, "─"))
        if outcome.error is not None:
            codes.append(outcome.error.exit_code)
            if collector is None:
                console.error(outcome.error)
        else:
            codes.append(view(collector or console, outcome.value) or 0)
        if collector is not None:
            entry: dict[str, Any] = {"host": outcome.name, "exit_code": codes[-1], "seconds": round(outcome.seconds, 3)}
            if outcome.error is not None:
                entry["error"] = outcome.error.as_dict()
            else:
                entry["result"] = collector.documents[0] if len(collector.documents) == 1 else collector.documents
            entries.append(entry)
    failing = [outcome.name for outcome, code in zip(outcomes, codes, strict=True) if code]
    worst = max(codes, default=0)
    if console.json:
        console.document({"schema": "remoteops.fleet/1", "exit_code": worst, "failing": failing, "hosts": entries})
    else:
        console.say(
            f"{len(outcomes) - len(failing)} of {len(outcomes)} hosts fine"
            + (f"; not: {', '.join(failing)}" if failing else "")
        )
    return worst


def _collector() -> Any:
    """A console whose documents become parts of one. Made here: not every caller has a console."""
    from remoteops.console import Console

    class Collector(Console):
        def __init__(self) -> None:
            super().__init__(json=True)
            self.documents: list[dict[str, Any]] = []

        def document(self, value: dict[str, Any]) -> None:
            self.documents.append(value)

        def event(self, value: dict[str, Any]) -> None:
            self.documents.append(value)

    return Collector()


def shell(host: Any, line: str) -> Completed:
    """Run one line in the user's shell on a host: ``fab -H HOST -- LINE``."""
    with connect(host) as link:
        return link.exec(["sh", "-c", 'exec "${SHELL:-/bin/sh}" -c "$1"', "sh", line], check=False)


def show_shell(console: Console, done: Completed) -> int:
    """What the line printed; gives its exit status, as ssh does (128 + n for a signal is up to the host's shell)."""
    out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    code = done.exit_status if done.exit_status is not None else 1
    if console.json:
        console.document(
            {
                "schema": "remoteops.shell/1",
                "exit_status": done.exit_status,
                "exit_signal": done.exit_signal,
                "stdout": out,
                "stderr": err,
            }
        )
        return code
    if out:
        console.say(out.rstrip("\n"))
    if err:
        console.note(err.rstrip("\n"))
    if done.exit_signal:
        console.note(f"killed by SIG{done.exit_signal}")
    return code

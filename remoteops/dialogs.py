"""What a task does when it takes more than one call: show a plan, ask, go on; follow and sum up.

Here use cases and console meet; neither knows the other. Every function returns an exit code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remoteops.command import Session
from remoteops.console import Console
from remoteops.errors import MissingPackage, RemoteOpsError, UsageError

if TYPE_CHECKING:
    from remoteops.inventory import Host


def probing(session: Session, *, html: str, baseline: str, **options: Any) -> int:
    """Audit each host; with ``html`` also write a page (for one host)."""
    from pathlib import Path

    from remoteops import probe
    from remoteops.console import findings
    from remoteops.console import html as pages

    def view(console: Any, document: Any) -> int:
        if html:
            place = Path(html)
            if len(session.hosts) > 1:
                place = place.with_stem(f"{place.stem}-{document['host']}")
            console.note(f"wrote {pages.write(place, document)}")
        if console.json:
            console.document(document)
        else:
            findings.show(console, document, everything=options["everything"])
        return probe.exit_code(document)

    release = None if baseline == "none" else baseline
    return session.each(lambda host: probe.probe(host, baseline=release, **options), view)


def patching(
    session: Session, *, only: tuple[str, ...], model: str | None, yes: bool, dry_run: bool, force: bool
) -> int:
    """Audit, plan, show, ask, apply, prove, on each host in turn (each has its own diff to read).

    Of several hosts one that fails does not keep the others from their turn; the worst exit code counts.
    """
    hosts = session.hosts
    if len(hosts) == 1:
        return _patch(session.console, hosts[0], only, model, yes, dry_run, force)
    codes: dict[str, int] = {}
    entries: list[dict[str, Any]] = []
    for host in hosts:
        console = _Kept() if session.console.json else session.console
        console.say(f"── {host.name} ".ljust(60, "─"))
        key = "result"
        try:
            codes[host.name] = _patch(console, host, only, model, yes, dry_run, force)
        except RemoteOpsError as error:
            console.error(error)
            codes[host.name], key = error.exit_code, "error"
        if isinstance(console, _Kept):
            entries.append({"host": host.name, "exit_code": codes[host.name], key: console.kept})
    worst, failing = max(codes.values()), [name for name, code in codes.items() if code]
    if session.console.json:
        found = {"schema": "remoteops.fleet/1", "exit_code": worst, "failing": failing, "hosts": entries}
        session.console.document(found)
        return worst
    told = f"; not: {', '.join(failing)}" if failing else ""
    session.console.say(f"{len(hosts) - len(failing)} of {len(hosts)} hosts fine{told}")
    return worst


class _Kept(Console):
    """A console that keeps a host's document for the one of all hosts."""

    def __init__(self) -> None:
        super().__init__(json=True)
        self.kept: dict[str, Any] | None = None

    def document(self, value: dict[str, Any]) -> None:
        self.kept = value


def _patch(
    console: Console, host: Host, only: tuple[str, ...], model: str | None, yes: bool, dry_run: bool, force: bool
) -> int:
    from remoteops import patch
    from remoteops.console import changes
    from remoteops.remote import open_agent

    with open_agent(host) as agent:
        planned = patch.plan(host, only=only, model=model, agent=agent)
        if not planned.done:
            changes.plan(console, planned)
        if dry_run:
            if console.json:
                console.document({**planned.as_dict(), "host": host.name})
            elif planned.plan.files and not planned.done:
                console.note("nothing was written (--dry-run)")
            left = [item.finding for item in planned.plan.remaining]
            return 1 if any(one.get("confidence") != "risk" for one in left) else 0
        nothing = planned.plan.empty and not planned.state["patches"]
        if not (planned.done or nothing or console.confirm(f"apply this to {host.name}?", yes=yes)):
            raise UsageError(
                "nothing was changed",
                host=host.name,
                tried="a question on the terminal",
                hint="answer y, or pass --yes where there is no terminal",
            )
        done = patch.apply(host, planned, force=force, agent=agent, on_event=_phases(console))
    return changes.outcome(console, host.name, {**done.as_dict(), "done": planned.done})


def _phases(console: Console) -> Any:
    def tell(event: dict[str, Any]) -> None:
        if event.get("event") == "phase":
            console.note(f"{event['phase']} ...")

    return tell


def statuses(session: Session, run: str | None, *, watch: bool, limit: int) -> int:
    """One run in detail, or an overview of several hosts; kept up to date with ``watch``."""
    from remoteops import logs, runs
    from remoteops.console import status as views
    from remoteops.console.live import LiveView

    hosts = session.hosts
    targets = [logs.Target(host, run) for host in hosts]
    what = logs.What(log=False, status=True)
    if watch and len(hosts) == 1:
        with LiveView(session.console, hosts[0].name) as view:
            return logs.follow(targets, view, what).exit_code
    if watch:
        with views.StatusTable(session.console, targets) as table:
            return logs.follow(targets, table, what).exit_code
    if len(hosts) == 1:
        return views.show(session.console, runs.status(hosts[0], run))
    return views.overview(session.console, runs.overview(hosts, limit=limit))


def following(
    session: Session,
    run: str | None,
    *,
    lines: str,
    no_follow: bool,
    since: str,
    grep: str | None,
    ignore_case: bool,
    raw: bool,
) -> int:
    """Show a log and go on with it until the run is over."""
    from remoteops import logs
    from remoteops.console.logview import LogView

    at, ago = _moment(since)
    what = logs.What(
        lines=_lines(lines), since=at, since_ago=ago, grep=grep, ignore_case=ignore_case, follow=not no_follow
    )
    targets = [logs.Target(host, run) for host in session.hosts]
    return logs.follow(targets, LogView(session.console, targets, raw=raw), what).exit_code


def stopping(session: Session, run: str | None, *, leftovers: bool, yes: bool, grace: float) -> int:
    """Ask, then stop a run, or end what earlier runs left behind."""
    from remoteops import runs
    from remoteops.console import status as views

    host, console = session.host, session.console
    if leftovers:
        found = runs.leftovers(host)
        if not found["leftovers"]:
            return views.leftovers(console, found)
        if not console.json:
            views.leftovers(console, found)
        _ask(session, f"end these on {host.name}?", yes)
        return views.leftovers(console, runs.stop_leftovers(host, grace=grace))
    now = runs.status(host, run)
    if now["state"] not in ("done", "failed", "stopped", "lost"):
        _ask(session, f"stop {now['run']} on {host.name} ({now['state']})?", yes)
    return views.stopped(console, runs.stop(host, now["run"], grace=grace))


def _ask(session: Session, question: str, yes: bool) -> None:
    if not session.console.confirm(question, yes=yes):
        raise UsageError(
            "nothing was stopped",
            tried="a question on the terminal",
            hint="answer y, or pass --yes where there is no terminal",
        )


def _lines(text: str) -> int | None:
    if text == "all":
        return None
    if text.isdigit():
        return int(text)
    raise UsageError(f"--lines takes a number or 'all', not '{text}'")


def _moment(text: str) -> tuple[float | None, float | None]:
    """``--since``: '90s', '15m', '2h', '1d' ago, or a local time '14:05', '2026-11-30 14:05'.

    Returns (unix time, None) or (None, seconds ago).
    """
    import datetime
    import re

    if not text:
        return None, None
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text):
        return None, float(ago[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[ago[2]]
    today = datetime.datetime.now().astimezone()
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            moment = datetime.datetime.combine(today.date(), datetime.time.fromisoformat(text.zfill(5)), today.tzinfo)
        else:
            moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--since does not understand '{text}'", hint="15m, 2h, 14:05 or 2026-11-30T14:05") from None
    return moment.timestamp(), None


def extracting(session: Session, *, detach: bool, **options: Any) -> int:
    """Check, start, follow with a live view, sum up. Ctrl-C leaves the run alone."""
    from remoteops import extract
    from remoteops.console import extraction
    from remoteops.console.live import LiveView

    host, console = session.host, session.console
    wanted = extract.Options(**options)
    if console.json or detach:
        document = extract.extract(host, wanted, detach=detach, on_event=_steps(session))
        return int(extraction.show_extract(console, document))
    with LiveView(console, host.name) as view:

        def tell(event: dict[str, Any]) -> None:
            if event["event"] == "step":
                view.phase(event["step"])
            elif event["event"] == "started":
                view.phase("start", "done", f"run {event['run']}, engine {event['engine']}, layers {event['layers']}")

        document = extract.extract(host, wanted, sink=view, on_event=tell)
    return int(extraction.show_extract(console, document))


def _steps(session: Session) -> Any:
    def tell(event: dict[str, Any]) -> None:
        if event.get("event") == "step":
            session.console.note(f"{event['step']} ...")
        elif event.get("event") == "started":
            session.console.note(f"run {event['run']} started")

    return tell


def verifying(session: Session, run: str | None, *, out: str | None, reference: int) -> int:
    """Read back what a run wrote and say whether it is right."""
    from remoteops import verify
    from remoteops.console import extraction

    return session.one(
        lambda host: verify.verify(host, run, out=out, reference=reference, on_event=_steps(session)),
        extraction.show_verify,
    )


def pulling(
    session: Session, run: str | None, *, to: str, samples: int | None, rows: tuple[str, ...], out: str | None
) -> int:
    """Copy samples here, with a bar of bytes where there is a terminal."""
    from pathlib import Path

    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from remoteops import pull
    from remoteops.console import extraction

    if not all(row.isdigit() for row in rows):
        raise UsageError("--rows takes row numbers", tried=" ".join(rows), hint="--rows 3 --rows 17")
    console = session.console
    with Progress(
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console.aside,
        transient=True,
        disable=not console.aside.is_terminal,
    ) as bar:
        task = bar.add_task("pull", total=None)

        def tell(event: dict[str, Any]) -> None:
            if event["event"] == "progress" and "bytes_total" in event:
                bar.update(task, completed=event["bytes"], total=event["bytes_total"])

        document = pull.pull(
            session.host,
            run,
            to=Path(to),
            samples=samples,
            out=out,
            on_event=tell,
            rows=[int(row) for row in rows] or None,
        )
    return int(extraction.show_pull(console, document))


def auditing(
    session: Session,
    consumer: str,
    provider: str,
    *,
    html: str,
    consumer_path: str | None,
    provider_path: str | None,
    baseline: str,
    everything: bool,
    **options: Any,
) -> int:
    """The same audit as `probe`, on releases from the package index or on folders here; no host is asked."""
    from pathlib import Path

    from remoteops import probe
    from remoteops.console import findings
    from remoteops.console import html as pages

    try:
        document = probe.audit(
            consumer,
            provider,
            consumer_path=consumer_path,
            provider_path=provider_path,
            baseline=None if baseline == "none" else baseline,
            everything=everything,
            **options,
        )
    except MissingPackage as error:
        # Exit code 1 is kept for the answer "they will not work together"; here nothing was audited.
        raise UsageError(error.message, tried=error.tried, hint=error.hint, **error.data) from None
    if html:
        session.console.note(f"wrote {pages.write(Path(html), document)}")
    if session.console.json:
        session.console.document(document)
    else:
        findings.show(session.console, document, everything=everything)
    return probe.exit_code(document)


def comparing(
    session: Session, consumers: tuple[str, ...], providers: tuple[str, ...], *, html: str, **options: Any
) -> int:
    """Each consumer release against each provider release."""
    from pathlib import Path

    from remoteops import matrix
    from remoteops.console import findings
    from remoteops.console import html as pages

    document = matrix.matrix(
        consumers, providers, on_event=lambda event: session.console.note(matrix.describe(event)), **options
    )
    if html:
        session.console.note(f"wrote {pages.write(Path(html), document)}")
    if session.console.json:
        session.console.document(document)
    else:
        findings.show_matrix(session.console, document)
    return 0

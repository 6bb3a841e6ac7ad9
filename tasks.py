"""The tasks of `fab` and `remoteops`: arguments, help, and one call each. `fab --list` shows them.

Every task takes -H for hosts and groups of the inventory (before the task's name: `fab -H a,b status`), and --json.
"""

from invoke import Collection

from remoteops import cli
from remoteops.command import Session, command

cli.adopt()

RUN = "run id or its beginning; the newest run when left out"


@command(
    help={
        "model": "architecture class: judge by this model only",
        "all": "also list the sites that are fine",
        "runtime": "also import both on the host and compare signatures",
        "shell": "also give the shell commands that show each finding by hand",
        "run": "with --shell: also run them",
        "consumer": "package that reaches in",
        "provider": "package that is reached into",
        "baseline": "release the consumer was written for: auto, none, or vllm==0.11.0",
        "html": "also write a page to this file",
    }
)
def probe(
    session: Session,
    model: str | None = None,
    all: bool = False,
    runtime: bool = False,
    shell: bool = False,
    run: bool = False,
    consumer: str | None = None,
    provider: str | None = None,
    baseline: str = "auto",
    html: str = "",
) -> int:
    """Will the libraries on the host work together? Exit code 1 when they will not."""
    from remoteops import dialogs

    return dialogs.probing(
        session,
        html=html,
        model=model,
        everything=all,
        runtime=runtime,
        shell=shell,
        run=run,
        consumer=consumer,
        provider=provider,
        baseline=baseline,
    )


@command(
    help={
        "yes": "do not ask",
        "dry_run": "only show",
        "revert": "bring the original bytes back",
        "status": "say what is patched",
        "only": "only this rule or recipe (may be repeated)",
        "model": "architecture class",
        "force": "also while a process uses the venv",
    }
)
def patch(
    session: Session,
    yes: bool = False,
    dry_run: bool = False,
    revert: bool = False,
    status: bool = False,
    only: tuple[str, ...] = (),
    model: str | None = None,
    force: bool = False,
) -> int:
    """Make them work together: the smallest reversible edits, shown first, proved after."""
    from remoteops import dialogs, patch
    from remoteops.console import changes

    if status:
        return session.each(patch.status, changes.state)
    if revert:
        return session.each(lambda host: patch.revert(host, force=force), changes.reverted)
    return dialogs.patching(session, only=only, model=model, yes=yes, dry_run=dry_run, force=force)


@command(
    help={
        "samples": "rows of the dataset",
        "patch": "patch first where the audit asks for it",
        "engine": "auto, connector, generator, generator-stock",
        "layers": "completed layers, as 2,16,29,32 or default",
        "max_length": "tokens a row",
        "dataset": "path on the host, or local:PATH",
        "model": "path on the host",
        "output": "folder on the host",
        "format": "speculators-v1 or safetensors",
        "dtype": "of the states",
        "reference": "rows to recompute with transformers",
        "max_dropped": "share of rows that may be unusable",
        "seed": "order of the rows",
        "resume": "run to go on with, or last",
        "rehearse": "with a tiny model of the same shape",
        "detach": "do not follow",
        "force": "skip what preflight says (named in the summary)",
        "allow_second": "beside another run",
    }
)
def extract(
    session: Session,
    samples: int | None = None,
    patch: bool = False,
    engine: str | None = None,
    layers: str | None = None,
    max_length: int | None = None,
    dataset: str | None = None,
    model: str | None = None,
    output: str | None = None,
    format: str | None = None,
    dtype: str | None = None,
    reference: int | None = None,
    max_dropped: float | None = None,
    seed: int | None = None,
    resume: str | None = None,
    rehearse: bool = False,
    detach: bool = False,
    force: bool = False,
    allow_second: bool = False,
) -> int:
    """Extract hidden states: preflight, a run that outlives the link, progress, verification, summary."""
    from remoteops import dialogs

    return dialogs.extracting(
        session,
        detach=detach,
        samples=samples,
        patch=patch,
        engine=engine,
        layers=layers,
        max_length=max_length,
        dataset=dataset,
        model=model,
        output=output,
        format=format,
        dtype=dtype,
        reference=reference,
        max_dropped=max_dropped,
        seed=seed,
        resume=resume,
        rehearse=rehearse,
        force=force,
        allow_second=allow_second,
    )


@command(
    positional="run",
    help={
        "run": RUN,
        "out": "a folder on the host instead of a run",
        "reference": "rows to recompute with transformers",
    },
)
def verify(session: Session, run: str | None = None, out: str | None = None, reference: int = 0) -> int:
    """Read back what a run wrote: token ids, shapes, dtype, finite, complete; and against transformers."""
    from remoteops import dialogs

    return dialogs.verifying(session, run, out=out, reference=reference)


@command(
    positional="run",
    help={
        "run": RUN,
        "to": "folder here",
        "samples": "how many",
        "rows": "this row (may be repeated)",
        "out": "a folder on the host instead of a run",
    },
)
def pull(
    session: Session,
    run: str | None = None,
    to: str = "pulled",
    samples: int | None = None,
    rows: tuple[str, ...] = (),
    out: str | None = None,
) -> int:
    """Copy samples of a run here, checked by hash; goes on where a broken pull stopped."""
    from remoteops import dialogs

    return dialogs.pulling(session, run, to=to, samples=samples, rows=rows, out=out)


@command(positional="run", help={"run": RUN, "watch": "keep it up to date", "limit": "runs a host, with several hosts"})
def status(session: Session, run: str | None = None, watch: bool = False, limit: int = 3) -> int:
    """How is a run doing? With several hosts: the newest runs of each."""
    from remoteops import dialogs

    return dialogs.statuses(session, run, watch=watch, limit=limit)


@command(help={"limit": "how many"})
def runs(session: Session, limit: int = 20) -> int:
    """List the runs of a host, newest first."""
    from remoteops import runs
    from remoteops.console import status

    return session.each(lambda host: runs.list(host, limit=limit), status.runs)


@command(
    positional="run",
    help={
        "run": RUN,
        "lines": "lines to begin with, or all",
        "no_follow": "stop at the end",
        "since": "15m, 2h, 14:05",
        "grep": "only lines that match this pattern",
        "ignore_case": "with --grep",
        "raw": "pass terminal control through",
    },
)
def tail_logs(
    session: Session,
    run: str | None = None,
    lines: str = "10",
    no_follow: bool = False,
    since: str = "",
    grep: str | None = None,
    ignore_case: bool = False,
    raw: bool = False,
) -> int:
    """Follow a run's log to its end; a lost link is picked up at the next byte. Ctrl-C leaves the run alone."""
    from remoteops import dialogs

    return dialogs.following(
        session, run, lines=lines, no_follow=no_follow, since=since, grep=grep, ignore_case=ignore_case, raw=raw
    )


@command(
    positional="run",
    help={
        "run": RUN,
        "leftovers": "end what earlier runs left on the GPUs",
        "yes": "do not ask",
        "grace": "seconds between asking and killing",
    },
)
def stop(
    session: Session, run: str | None = None, leftovers: bool = False, yes: bool = False, grace: float = 60.0
) -> int:
    """Stop a run and everything it started; what it has written stays valid."""
    from remoteops import dialogs

    return dialogs.stopping(session, run, leftovers=leftovers, yes=yes, grace=grace)


@command(
    help={
        "consumer": "release, as speculators==0.3.0, or import name with --consumer-path",
        "provider": "release, as vllm==0.17.1, or import name with --provider-path",
        "consumer_path": "folder that holds the package",
        "provider_path": "folder that holds the package",
        "baseline": "cached (what the consumer pins, if fetched before), auto (fetch it), none, a release",
        "baseline_path": "folder that holds the provider the consumer was written for; more after : date the breaks",
        "model": "architecture class",
        "all": "also list the sites that are fine",
        "shell": "also give the shell commands",
        "run": "with --shell: also run them",
        "html": "also write a page",
    }
)
def audit(
    session: Session,
    consumer: str,
    provider: str,
    consumer_path: str | None = None,
    provider_path: str | None = None,
    baseline: str = "cached",
    baseline_path: str | None = None,
    model: str | None = None,
    all: bool = False,
    shell: bool = False,
    run: bool = False,
    html: str = "",
) -> int:
    """The audit of `probe` on releases or folders here; no host is asked."""
    from remoteops import dialogs

    return dialogs.auditing(
        session,
        consumer,
        provider,
        html=html,
        consumer_path=consumer_path,
        provider_path=provider_path,
        baseline=baseline,
        baseline_path=baseline_path,
        everything=all,
        model=model,
        shell=shell,
        run=run,
    )


@command(
    help={
        "consumer": "releases, as speculators==0.3.0,0.4.0.1 (may be repeated)",
        "provider": "releases, as vllm>=0.11 (may be repeated)",
        "model": "architecture class",
        "baseline": "release of the provider to compare with",
        "jobs": "processes",
        "fresh": "ignore earlier results",
        "html": "also write a page",
    }
)
def matrix(
    session: Session,
    consumer: tuple[str, ...] = (),
    provider: tuple[str, ...] = (),
    model: str | None = None,
    baseline: str | None = None,
    jobs: int | None = None,
    fresh: bool = False,
    html: str = "",
) -> int:
    """Which release can I install? Audits each consumer against each provider release."""
    from remoteops import dialogs

    return dialogs.comparing(
        session, consumer, provider, html=html, model=model, baseline=baseline, jobs=jobs, fresh=fresh
    )


@command(positional="host", help={"host": "only this host or group"})
def hosts(session: Session, host: str = "") -> int:
    """Show what each host of the inventory resolves to."""
    from remoteops.console import tables
    from remoteops.hosts import describe

    return tables.hosts(session.console, describe(session.inventory, [host] if host else session.asked))


@command(help={"line": "a line for the login shell of each host"})
def shell(session: Session, line: str) -> int:
    """Run a command on each host over the verified link: fab -H a,b shell "nvidia-smi -L"."""
    from remoteops import fleet

    return session.each(lambda host: fleet.shell(host, line), fleet.show_shell)


@command()
def doctor(session: Session) -> int:
    """Check each layer to a host in order, and say what to do about the first that fails."""
    from remoteops.console import tables
    from remoteops.doctor import examine

    return session.each(examine, tables.doctor)


@command(help={"profile": "seed, or current"})
def lab_up(session: Session, profile: str = "seed") -> int:
    """Build, start and furnish the embedded host (tasks aimed at it do this by themselves)."""
    from remoteops import lab
    from remoteops.console import tables

    return tables.lab(session.console, lab.up(profile, session.report))


@command(help={"profile": "only this profile"})
def lab_status(session: Session, profile: str = "") -> int:
    """Say what there is of the embedded host."""
    from remoteops import lab
    from remoteops.console import tables

    return tables.lab(session.console, lab.status(profile))


@command(help={"profile": "only this profile", "purge": "also remove its venv, models and runs from disk"})
def lab_down(session: Session, profile: str = "", purge: bool = False) -> int:
    """Stop the embedded host's SSH server."""
    from remoteops import lab
    from remoteops.console import tables

    return tables.lab_down(session.console, lab.down(profile, purge=purge, report=session.report))


ns = Collection(probe, patch, extract, verify, pull, status, runs, tail_logs, stop, audit, matrix, hosts, doctor, shell)
ns.add_collection(Collection("lab", up=lab_up, status=lab_status, down=lab_down))

"""The tasks of `fab` and `remoteops`: arguments, help, and one call each. `fab --list` shows them."""
from invoke import Collection

from remoteops import cli
from remoteops.command import Session, command

cli.adopt()


@command(positional="host", help={"host": "only this host"})
def hosts(session: Session, host: str = "") -> int:
    """Show what each host of the inventory resolves to."""
    from remoteops.console import tables
    from remoteops.hosts import describe
    return tables.hosts(session.console, describe(session.inventory, host))


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


ns = Collection(hosts, doctor)
ns.add_collection(Collection("lab", up=lab_up, status=lab_status, down=lab_down))

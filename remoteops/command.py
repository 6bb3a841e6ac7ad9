"""What every task has in common: the hosts it aims at, how results and errors are shown, its exit code.

``@command`` makes a Fabric task of a function ``(session, ...)``. A parameter's annotation decides how its text is read
(``int``, ``float``, ``bool``, ``str``, a tuple for several); nothing gets a one-letter flag by accident.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import fabric
from invoke import Argument, Exit
from invoke.exceptions import UnexpectedExit

from remoteops.console import Console
from remoteops.errors import Defect, Interrupted, RemoteOpsError, UsageError

if TYPE_CHECKING:
    from remoteops.inventory import Host, Inventory

View = Callable[[Console, Any], int | None]


class Session:
    """One task's run: its console, its inventory and the hosts it aims at."""

    def __init__(self, hosts: Sequence[str], json: bool) -> None:
        self.console = Console(json)
        self.asked = tuple(hosts)
        self._inventory: Inventory | None = None

    @property
    def inventory(self) -> Inventory:
        if self._inventory is None:
            from remoteops.inventory import load

            self._inventory = load()
        return self._inventory

    @property
    def hosts(self) -> list[Host]:
        """The hosts of -H (names, groups, ``all``), or the inventory's default; the lab is brought up."""
        named = self.inventory.names if "all" in self.asked else self.asked or (self.inventory.default,)
        from remoteops import transport

        transport.tell = lambda line: self.console.note(line)
        return [self.ready(host) for host in self.inventory.select(named)]

    @property
    def host(self) -> Host:
        """The one host of a task that takes only one. Raises UsageError when -H names several."""
        hosts = self.hosts
        if len(hosts) != 1:
            raise UsageError("this takes one host", tried=f"-H {','.join(self.asked)}", hint="name one host with -H")
        return hosts[0]

    def ready(self, host: Host) -> Host:
        """The host as an SSH host; the embedded one is started first where needed."""
        if host.connect != "lab":
            return host
        from remoteops.lab import resolve

        return resolve(host, self.report)

    def report(self, line: str) -> None:
        """What the lab says while it is being built."""
        self.console.note(f"lab: {line}")

    def one(self, function: Callable[[Host], Any], view: View) -> int:
        """Call for the one host and show the result. Returns the exit code."""
        return view(self.console, function(self.host)) or 0

    def each(self, function: Callable[[Host], Any], view: View) -> int:
        """Call for every host, side by side, and show each result. Returns the worst exit code."""
        hosts = self.hosts
        if len(hosts) == 1:
            return view(self.console, function(hosts[0])) or 0
        from remoteops import fleet

        return fleet.show(self.console, fleet.each(hosts, function), view)


class Flag(Argument):  # type: ignore[misc]
    """An option whose text is checked when it is read, with a line instead of a traceback."""

    def set_value(self, value: Any, cast: bool = True) -> None:
        try:
            super().set_value(value, cast)
        except (ValueError, TypeError):
            wanted = {int: "a whole number", float: "a number"}.get(self.kind, "another kind of value")
            raise UsageError(f"--{self.name} takes {wanted}, not '{value}'") from None


class Command(fabric.Task):  # type: ignore[misc]
    """A task that ends with one of the exit codes 0, 1, 2, 3, 130 and never with a traceback.

    ``optional_positional`` is the parameter that may be given without its flag: ``fab status RUN``.
    """

    def __init__(self, body: Callable[..., Any], optional_positional: str = "", **kwargs: Any) -> None:
        self.optional_positional = optional_positional
        super().__init__(body, auto_shortflags=False, **kwargs)

    def argspec(self, body: Any) -> inspect.Signature:
        """The body's parameters, and ``json``, which every task has."""
        signature = inspect.signature(body, eval_str=True)
        parameters = list(signature.parameters.values())[1:]
        json = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
        return signature.replace(parameters=[*parameters, json])

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:
        parameters = self.argspec(self.body).parameters.values()
        return [self._argument(parameter) for parameter in parameters]

    def _argument(self, parameter: inspect.Parameter) -> Argument:
        kinds = _kinds(parameter.annotation)
        kind: Any = bool if bool in kinds else list if tuple in kinds else next(iter(kinds & {int, float}), str)
        default = list(parameter.default) if kind is list else parameter.default
        required = parameter.default is inspect.Parameter.empty
        help_text = "one JSON document on stdout" if parameter.name == "json" else self.help.get(parameter.name, "")
        dashed = parameter.name.replace("_", "-")
        # Invoke recurses without end when an argument's attribute name equals its flag.
        return Flag(
            names=(dashed,),
            attr_name=parameter.name if dashed != parameter.name else None,
            kind=kind,
            positional=required,
            default=None if required else default,
            help=help_text,
        )

    def __call__(self, context: Any, *args: Any, **kwargs: Any) -> None:
        json = bool(kwargs.pop("json", False))
        session = Session(_asked(context), json)
        code = guarded(session.console, lambda: self.body(session, *args, **kwargs))
        self.times_called += 1
        if code:
            raise Exit(code=code)


def guarded(console: Console, action: Callable[[], Any]) -> int:
    """Run, show any error as a user should see it, and return the exit code. The one place where errors end."""
    try:
        result = action()
        return result if isinstance(result, int) else 0
    except RemoteOpsError as error:
        console.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        console.error(Interrupted("interrupted", hint="a run that was started goes on; `fab status` shows it"))
        return Interrupted.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing is left to say to it. What is still buffered would fail
        # once more when Python flushes it at exit, and make the exit code 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exit, UnexpectedExit, SystemExit):
        raise
    except OSError as error:
        # A folder or file of this machine (--to, --html, the cache); what a link or a host says is typed already.
        console.error(_local_file(error) if error.filename else _defect(error))
        return UsageError.exit_code if error.filename else Defect.exit_code
    except Exception as error:  # noqa: BLE001 - a defect of ours must not end in a traceback either
        console.error(_defect(error))
        return Defect.exit_code


def _local_file(error: OSError) -> UsageError:
    return UsageError(
        f"'{error.filename}' on this machine: {error.strerror}",
        hint="choose another place, or mend its rights or its disk",
    )


def _defect(error: Exception) -> Defect:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w", prefix="remoteops-defect-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write(traceback.format_exc())
    place = traceback.extract_tb(error.__traceback__)[-1]
    return Defect(
        f"a defect of remoteops: {type(error).__name__}: {error}",
        tried=f"{place.name} in {place.filename.rsplit('/', 1)[-1]}:{place.lineno}",
        hint=f"please report it with {file.name}",
        defect=True,
    )


def command(
    *, positional: str = "", help: Mapping[str, str] | None = None, name: str | None = None
) -> Callable[..., Command]:
    """Decorator: a function ``(session, ...)`` becomes a task. ``positional`` may be given without its flag."""

    def wrap(body: Callable[..., Any]) -> Command:
        return Command(body, optional_positional=positional, help=dict(help or {}), name=name)

    return wrap


def _asked(context: Any) -> tuple[str, ...]:
    """Host names of -H. Our executor leaves them in the configuration; a stock one gives a Connection."""
    named = context.config.get("remoteops", {}).get("hosts", ())
    if named:
        return tuple(named)
    if isinstance(context, fabric.Connection):
        return (str(context.original_host),)
    return ()


def _kinds(annotation: Any) -> set[Any]:
    """The plain types in an annotation: ``int | None`` -> {int, NoneType}, ``tuple[str, ...]`` -> {tuple}."""
    import types
    import typing

    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_kinds(part) for part in typing.get_args(annotation)))
    return {origin or annotation}

"""The console script ``remoteops``, and what makes ``fab`` behave the same once it has read fabfile.py.

Fabric's own program runs a task once a host, one after another, stops at the first that fails, aims at this machine
without -H, opens ad hoc connections without checking host keys, and ends with a traceback on most errors. The
classes here keep its command line and replace these five.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import fabric
import fabric.main
from invoke import Call, Collection, Exit, ParseError

from remoteops.command import Command
from remoteops.console import Console
from remoteops.errors import UsageError


class Executor(fabric.Executor):  # type: ignore[misc]
    """Calls each task once, with all hosts of -H; ``-H HOST -- COMMAND`` is the task ``shell``, over a verified Link.

    (Stock ``fab`` reads no fabfile.py when it is given a command and no task; nothing of ours is asked then.)
    """

    def expand_calls(self, calls: list[Any], apply_hosts: bool = True) -> list[Any]:
        named = self.core[0].args.hosts.value if self.core else None
        self.config["remoteops"] = {"hosts": [name.strip() for name in (named or "").split(",") if name.strip()]}
        expanded = [Call(task=call) if not hasattr(call, "task") else call for call in calls]
        if self.core is not None and self.core.remainder:
            expanded.append(Call(task=self.collection["shell"], kwargs={"line": self.core.remainder}))
        return expanded


class Program(fabric.main.Fab):  # type: ignore[misc]
    """Fabric's program with our executor, exit code 2 for what cannot be parsed, and RUN without a flag."""

    def execute(self) -> None:
        Executor(self.collection, self.config, self.core).execute(*self.tasks)

    def parse_tasks(self) -> None:
        self.core.unparsed[:] = with_flags(self.core.unparsed, self.collection)
        asked = list(self.core.unparsed)
        try:
            super().parse_tasks()
        except ParseError as error:
            problem = UsageError(explained(str(error), self.collection), hint=WHERE_TO_LOOK)
        except UsageError as error:
            problem = error
        else:
            return
        Console(json="--json" in asked).error(problem)
        raise Exit(code=2)


WHERE_TO_LOOK = "`fab --list` shows the tasks, `fab TASK --help` the options of one"


def explained(text: str, collection: Collection) -> str:
    """Invoke's message about the command line, in words for a user; with the nearest task where a name is wrong."""
    if missing := re.match(r"Flag <Flag: ([\w-]+).*> needed value and was not given one", text):
        return f"--{missing[1]} needs a value"
    if unknown := re.match(r"No idea what '(.*)' is!", text):
        word = unknown[1]
        near = [] if word.startswith("-") else difflib.get_close_matches(word, collection.task_names, n=1)
        meant = f"; did you mean '{near[0]}'?" if near else ""
        return f"there is no {'option' if word.startswith('-') else 'task'} '{word}'{meant}"
    return text


def with_flags(tokens: list[str], collection: Collection) -> list[str]:
    """Put the flag before an optional positional: ``status RUN`` -> ``status --run RUN``.

    Invoke knows required positionals only; a bare word after a task would be taken for another task's name.
    """
    known = collection.task_names
    names = {name for task, aliases in known.items() for name in (task, *aliases)}
    result: list[str] = []
    current: Any = None
    value_follows = False
    for token in tokens:
        if value_follows:
            value_follows = False
        elif token in names:
            current = collection[token]
        elif token.startswith("-"):
            value_follows = "=" not in token and _takes_value(current, token.lstrip("-"))
        elif isinstance(current, Command) and current.optional_positional:
            result.append("--" + current.optional_positional.replace("_", "-"))
        result.append(token)
    return result


def _takes_value(task: Any, name: str) -> bool:
    arguments = task.get_arguments() if isinstance(task, Command) else []
    return any(name in argument.names and argument.takes_value for argument in arguments)


def adopt() -> None:
    """Make the running ``fab`` one of ours: it creates its program before it reads fabfile.py."""
    program = fabric.main.program
    if type(program) is fabric.main.Fab:
        program.__class__ = Program


def load_tasks() -> ModuleType:
    """tasks.py: in a checkout from its root, else the copy that was installed with the package."""
    package = Path(__file__).resolve().parent
    for file in (package.parent / "tasks.py", package / "tasks.py"):
        if file.is_file():
            spec = importlib.util.spec_from_file_location("remoteops_tasks", file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["remoteops_tasks"] = module
            spec.loader.exec_module(module)
            return module
    raise FileNotFoundError("tasks.py came neither with a checkout nor with the package")


def main(argv: list[str] | None = None) -> None:
    """``remoteops``: the same tasks from any folder."""
    from importlib.metadata import version

    program = Program(
        name="remoteops",
        binary="remoteops",
        version=version("remoteops"),
        executor_class=Executor,
        config_class=fabric.Config,
        namespace=load_tasks().ns,
    )
    program.run(argv if argv is None else ["remoteops", *argv])

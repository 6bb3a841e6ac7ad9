"""inventory.yaml -> Host and Workload; every mistake is reported with file, line and key.

Where the file is looked for: ``--inventory``/``REMOTEOPS_INVENTORY``, the current folder and those above it,
``$XDG_CONFIG_HOME/remoteops/inventory.yaml``, and last the one that came with remoteops (it holds the lab).
What a host does not set comes from, in this order: the workload profile it names, ``defaults``, and the models'
own defaults (schema.py). Connection details left open there are decided by ssh_config when the link is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from remoteops.errors import InventoryError, UnknownHost
from remoteops.positions import Where, dotted, exists, line_of, mistake, nearest, parse, plain, read, walk
from remoteops.schema import Document, Host, HostSpec, LabSpec, Timeouts, Workload

__all__ = ["Host", "Inventory", "LabSpec", "Timeouts", "Workload", "find", "load"]

FILE_NAME = "inventory.yaml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_SECRET_KEY = re.compile(
    r"(?:^|_)(password|passwd|passphrase|secret|api_?key|access_?key|private_?key|(?<!max_)token)$", re.IGNORECASE
)
_SECRET_TEXT = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|://[^/\s:@]+:[^/\s@]+@"
)
_LOCAL_PATHS = ("identity_files", "known_hosts", "ssh_config")


class Inventory:
    """The hosts of one file.

    ``names`` in the file's order, ``groups`` (name -> host names), ``default`` (host name), ``path`` of the file.
    """

    def __init__(
        self, path: Path, default: str, hosts: Mapping[str, Host], groups: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.path = path
        self.default = default
        self.groups = dict(groups)
        self._hosts = dict(hosts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._hosts)

    def host(self, name: str | None = None) -> Host:
        """The host of that name, or the default one. Raises UnknownHost with the nearest names."""
        wanted = name or self.default
        if wanted in self._hosts:
            return self._hosts[wanted]
        if wanted in self.groups:
            raise UnknownHost(
                f"'{wanted}' is a group of {len(self.groups[wanted])} hosts, and this takes one host",
                hint="name one of " + ", ".join(self.groups[wanted]),
                file=str(self.path),
            )
        example = f"add it under 'hosts:', for example\n      {wanted}:\n        user: YOU\n        venv: /path/to/venv"
        raise UnknownHost(
            f"no host '{wanted}' in {self.path}",
            tried="hosts and groups of the inventory",
            hint=nearest(wanted, [*self._hosts, *self.groups]) or example,
            file=str(self.path),
        )

    def select(self, names: Sequence[str]) -> list[Host]:
        """Hosts for names and groups, each host once, in the order given. Raises UnknownHost."""
        chosen: dict[str, Host] = {}
        for name in names:
            for member in self.groups.get(name, (name,)):
                chosen.setdefault(member, self.host(member))
        return list(chosen.values())


def find(start: Path | None = None) -> Path:
    """The inventory file that applies in a folder. Raises InventoryError when there is none at all."""
    named = os.environ.get("REMOTEOPS_INVENTORY")
    if named:
        return Path(named).expanduser()
    here = (start or Path.cwd()).resolve()
    candidates = [folder / FILE_NAME for folder in (here, *here.parents)]
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    candidates.append(Path(config).expanduser() / "remoteops" / FILE_NAME)
    package = Path(__file__).resolve().parent
    candidates += [package / FILE_NAME, package.parent / FILE_NAME]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise InventoryError(
        "there is no inventory.yaml",
        tried=", ".join(str(item) for item in candidates[-4:]),
        hint="run from a folder that has one, or set REMOTEOPS_INVENTORY",
    )


def load(path: Path | None = None) -> Inventory:
    """Read, check and resolve an inventory. Raises InventoryError (data: file, line, key)."""
    file = path or find()
    text = read(file)
    tree = parse(file, text)
    _refuse_secrets(file, tree)
    try:
        document = Document.model_validate(plain(tree))
    except ValidationError as error:
        raise _explain(file, tree, error) from None
    for name in document.hosts:
        if name == "all":
            raise _at(file, tree, ("hosts", name), "'all' stands for every host of the inventory", "rename this host")
        if not _NAME.match(name):
            raise _at(
                file,
                tree,
                ("hosts", name),
                f"'{name}' is no usable host name",
                "letters, digits, dot, dash and underscore; users and ports have keys of their own",
            )
    groups = {name: tuple(members) for name, members in document.groups.items()}
    for group, members in groups.items():
        if group in document.hosts:
            raise _at(file, tree, ("groups", group), f"'{group}' is both a host and a group", "rename one of them")
        for index, member in enumerate(members):
            if member not in document.hosts:
                raise _at(
                    file,
                    tree,
                    ("groups", group, index),
                    f"group '{group}' names '{member}', which is no host",
                    nearest(member, list(document.hosts)) or "add it under 'hosts:'",
                )
    if not document.hosts:
        raise _at(file, tree, ("hosts",), "the inventory holds no host", "add one under 'hosts:'")
    default = document.default or next(iter(document.hosts))
    if default not in document.hosts:
        raise _at(
            file,
            tree,
            ("default",),
            f"the default host '{default}' is not under 'hosts:'",
            nearest(default, list(document.hosts)) or "",
        )
    hosts = {name: _resolve(file, tree, document, name, groups) for name in document.hosts}
    return Inventory(file, default, hosts, groups)


def _resolve(file: Path, tree: Any, document: Document, name: str, groups: Mapping[str, tuple[str, ...]]) -> Host:
    own = document.hosts[name] or HostSpec()
    layers = [_set_values(document.defaults), _set_values(own)]
    profile = own.workload.profile or document.defaults.workload.profile
    if profile is not None and profile in document.profiles:
        # A host's own keys win over its profile, the profile over the defaults for every host.
        layers.insert(1, {"workload": _set_values(document.profiles[profile])})
    elif profile is not None and profile not in (known := _shipped_profiles()):
        holder = ("hosts", name) if own.workload.profile else ("defaults",)
        raise _at(
            file,
            tree,
            (*holder, "workload", "profile"),
            f"there is no workload profile '{profile}'",
            nearest(profile, [*document.profiles, *known]) or "add it under 'profiles:'",
        )
    elif profile is not None:
        layers.insert(1, {"workload": known[profile]})
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merge(merged, layer)
    for key in _LOCAL_PATHS:
        if merged.get(key):
            merged[key] = _local(file.parent, merged[key])
    member_of = tuple(group for group, members in groups.items() if name in members)
    return Host.model_validate({**merged, "name": name, "groups": member_of})


def _shipped_profiles() -> dict[str, dict[str, Any]]:
    """Workload profiles that come with remoteops (knowledge/profiles.yaml), name -> workload keys."""
    file = Path(__file__).resolve().parent / "knowledge" / "profiles.yaml"
    if not file.is_file():
        return {}
    known = set(Workload.model_fields)
    profiles = (parse(file, read(file)) or {}).get("profiles", {})
    return {
        name: {key: value for key, value in plain(entry).items() if key in known} for name, entry in profiles.items()
    }


def _set_values(model: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(exclude_unset=True)
    return dumped


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _local(base: Path, value: Any) -> Any:
    """Paths on this machine: ~ is the user's home, relative ones start at the inventory's folder."""
    if isinstance(value, str):
        return value if value == "none" else str(base / Path(value).expanduser())
    return tuple(_local(base, item) for item in value)


# -- mistakes, in the file's own terms --------------------------------------------------------------------------------


def _refuse_secrets(file: Path, tree: Any) -> None:
    for where, value in walk(tree, ()):
        named = _SECRET_KEY.search(str(where[-1])) and value is not None and not isinstance(value, Mapping)
        if named or (isinstance(value, str) and _SECRET_TEXT.search(value)):
            raise _at(
                file,
                tree,
                where,
                f"'{dotted(where)}' looks like a secret; none may stand in the inventory",
                "use an SSH agent or a key file, and put tokens into the host's own environment; change this one, "
                "it may be in your version control already",
            )


def _explain(file: Path, tree: Any, error: ValidationError) -> InventoryError:
    """The first mistake in the order of the file, said in the file's own terms."""

    details = sorted(error.errors(include_url=False), key=lambda item: line_of(tree, item["loc"]) or 0)
    first = details[0]
    where = tuple(part for part in first["loc"] if exists(tree, part, first["loc"]))
    if first["type"] == "extra_forbidden":
        if not where:
            # A key that is no text (`: x` makes it null) cannot be found again in the tree.
            return _at(file, tree, where, f"a key here is no text: {first['loc'][-1]}", "keys are words")
        key, allowed = str(where[-1]), _allowed(where)
        hint = nearest(key, allowed) or "known keys here: " + ", ".join(sorted(allowed))
        return _at(file, tree, where, f"unknown key '{dotted(where)}'", hint)
    message = first["msg"][:1].lower() + first["msg"][1:]
    more = f" ({len(details) - 1} more)" if len(details) > 1 else ""
    return _at(
        file,
        tree,
        where,
        f"'{dotted(where)}': {message}{more}",
        "see docs/inventory.schema.json for what may stand here",
    )


def _allowed(where: Where) -> list[str]:
    """Keys that the mapping holding this key may have."""
    models: dict[str, Any] = {"workload": Workload, "timeouts": Timeouts, "lab": LabSpec, "defaults": HostSpec}
    holder = where[-2] if len(where) > 1 else None
    if holder is None:
        return list(Document.model_fields)
    if where[0] == "profiles":
        return list(Workload.model_fields)
    return list(models.get(str(holder), HostSpec).model_fields)


def _at(file: Path, tree: Any, where: Where, message: str, hint: str) -> InventoryError:
    return mistake(file, line_of(tree, where) or 1, message, hint, dotted(where))

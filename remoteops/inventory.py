"""inventory.yaml -> Host and Workload; every mistake is reported with file, line and key.

Where the file is looked for: ``--inventory``/``REMOTEOPS_INVENTORY``, the current folder and those above it,
``$XDG_CONFIG_HOME/remoteops/inventory.yaml``, and last the one that came with remoteops (it holds the lab).
What a host does not set comes from, in this order: the workload profile it names, ``defaults``, and the models'
own defaults (schema.py). Connection details left open there are decided by ssh_config when the link is opened.
"""
from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from remoteops.errors import InventoryError, UnknownHost
from remoteops.schema import Document, Host, HostSpec, LabSpec, Timeouts, Workload

__all__ = ["Host", "Inventory", "LabSpec", "Timeouts", "Workload", "find", "load"]

FILE_NAME = "inventory.yaml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_SECRET_KEY = re.compile(
    r"(?:^|_)(password|passwd|passphrase|secret|api_?key|access_?key|private_?key|(?<!max_)token)$", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|://[^/\s:@]+:[^/\s@]+@")
_LOCAL_PATHS = ("identity_files", "known_hosts", "ssh_config")
Path_ = tuple[str | int, ...]


class Inventory:
    """The hosts of one file.

    ``names`` in the file's order, ``groups`` (name -> host names), ``default`` (host name), ``path`` of the file.
    """

    def __init__(self, path: Path, default: str, hosts: Mapping[str, Host],
                 groups: Mapping[str, tuple[str, ...]]) -> None:
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
            raise UnknownHost(f"'{wanted}' is a group of {len(self.groups[wanted])} hosts, and this takes one host",
                              hint="name one of " + ", ".join(self.groups[wanted]), file=str(self.path))
        example = f"add it under 'hosts:', for example\n      {wanted}:\n        user: YOU\n        venv: /path/to/venv"
        raise UnknownHost(f"no host '{wanted}' in {self.path}", tried="hosts and groups of the inventory",
                          hint=_nearest(wanted, [*self._hosts, *self.groups]) or example, file=str(self.path))

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
    raise InventoryError("there is no inventory.yaml", tried=", ".join(str(item) for item in candidates[-4:]),
                         hint="run from a folder that has one, or set REMOTEOPS_INVENTORY")


def load(path: Path | None = None) -> Inventory:
    """Read, check and resolve an inventory. Raises InventoryError (data: file, line, key)."""
    file = path or find()
    text = _read(file)
    tree = _parse(file, text)
    _refuse_secrets(file, tree)
    try:
        document = Document.model_validate(_plain(tree))
    except ValidationError as error:
        raise _explain(file, tree, error) from None
    for name in document.hosts:
        if not _NAME.match(name):
            raise _at(file, tree, ("hosts", name), f"'{name}' is no usable host name",
                      "letters, digits, dot, dash and underscore; users and ports have keys of their own")
    groups = {name: tuple(members) for name, members in document.groups.items()}
    for group, members in groups.items():
        if group in document.hosts:
            raise _at(file, tree, ("groups", group), f"'{group}' is both a host and a group", "rename one of them")
        for index, member in enumerate(members):
            if member not in document.hosts:
                raise _at(file, tree, ("groups", group, index), f"group '{group}' names '{member}', which is no host",
                          _nearest(member, list(document.hosts)) or "add it under 'hosts:'")
    if not document.hosts:
        raise _at(file, tree, ("hosts",), "the inventory holds no host", "add one under 'hosts:'")
    default = document.default or next(iter(document.hosts))
    if default not in document.hosts:
        raise _at(file, tree, ("default",), f"the default host '{default}' is not under 'hosts:'",
                  _nearest(default, list(document.hosts)) or "")
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
        raise _at(file, tree, (*holder, "workload", "profile"), f"there is no workload profile '{profile}'",
                  _nearest(profile, [*document.profiles, *known]) or "add it under 'profiles:'")
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
    profiles = (_parse(file, _read(file)) or {}).get("profiles", {})
    return {name: {key: value for key, value in _plain(entry).items() if key in known}
            for name, entry in profiles.items()}


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


# -- reading with positions -----------------------------------------------------------------------------------------

def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InventoryError(f"{file} cannot be read: {error.strerror}", file=str(file), line=None, key=None,
                             hint="check REMOTEOPS_INVENTORY and the file's permissions") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InventoryError(f"{file}:{line}: not UTF-8 text (byte {error.object[error.start]:#04x})", file=str(file),
                             line=line, key=None, hint="save the file as UTF-8") from None


def _parse(file: Path, text: str) -> Any:
    """The document as ruamel's commented tree, which knows where each key stands."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError
    try:
        tree = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        problem = (error.problem or "not YAML").split("\n")[0]
        raise InventoryError(f"{file}:{line}: {problem}", file=str(file), line=line, key=None,
                             hint=_yaml_hint(problem)) from None
    except ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise InventoryError(f"{file}:{line}: {error.reason}", file=str(file), line=line, key=None,
                             hint="remove the control character") from None
    except (YAMLError, RecursionError, ValueError) as error:
        raise InventoryError(f"{file}: not usable YAML: {type(error).__name__}", file=str(file), line=None, key=None,
                             hint="check the file with a YAML linter") from None
    if tree is None:
        raise InventoryError(f"{file}:1: the file is empty", file=str(file), line=1, key=None, hint="add 'hosts:'")
    if not isinstance(tree, Mapping):
        raise InventoryError(f"{file}:1: the file holds no mapping", file=str(file), line=1, key=None,
                             hint="the top level has the keys default, defaults, profiles, groups, hosts")
    return tree


def _yaml_hint(problem: str) -> str:
    if "duplicate key" in problem:
        return "a key may stand once in each mapping: remove one of the two"
    if "\\t" in problem or "token" in problem:
        return "indent with spaces, and quote values that start with a special character"
    return "check the indentation and the colons on this line and the one before it"


def _plain(node: Any, depth: int = 0, budget: list[int] | None = None) -> Any:
    """The tree as plain dicts, lists and scalars. Anchors that would blow up the document are refused."""
    budget = budget if budget is not None else [100_000]
    budget[0] -= 1
    if depth > 50 or budget[0] < 0:
        raise InventoryError("the inventory nests too deep or is too large", file=None, line=None, key=None,
                             hint="use fewer anchors and aliases")
    if isinstance(node, Mapping):
        return {str(key): _plain(value, depth + 1, budget) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(value, depth + 1, budget) for value in node]
    if isinstance(node, str):
        return str(node)
    if isinstance(node, bool) or node is None:
        return node
    if isinstance(node, int):
        return int(node)
    return float(node) if isinstance(node, float) else str(node)


def _refuse_secrets(file: Path, tree: Any) -> None:
    for where, value in _walk(tree, ()):
        named = _SECRET_KEY.search(str(where[-1])) and value is not None and not isinstance(value, Mapping)
        if named or (isinstance(value, str) and _SECRET_TEXT.search(value)):
            raise _at(file, tree, where, f"'{_dotted(where)}' looks like a secret; none may stand in the inventory",
                      "use an SSH agent or a key file, and put tokens into the host's own environment; change this one, "
                      "it may be in your version control already")


def _walk(node: Any, where: Path_, depth: int = 0) -> Iterator[tuple[Path_, Any]]:
    if depth > 50:
        return
    items: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*where, key), value
        yield from _walk(value, (*where, key), depth + 1)


def _explain(file: Path, tree: Any, error: ValidationError) -> InventoryError:
    """The first mistake in the order of the file, said in the file's own terms."""
    def line_of(item: Any) -> int:
        return _line(tree, tuple(item["loc"])) or 0
    details = sorted(error.errors(include_url=False), key=line_of)
    first = details[0]
    where = tuple(part for part in first["loc"] if _exists(tree, part, first["loc"]))
    if first["type"] == "extra_forbidden":
        key, allowed = str(where[-1]), _allowed(where)
        hint = _nearest(key, allowed) or "known keys here: " + ", ".join(sorted(allowed))
        return _at(file, tree, where, f"unknown key '{_dotted(where)}'", hint)
    message = first["msg"][:1].lower() + first["msg"][1:]
    more = f" ({len(details) - 1} more)" if len(details) > 1 else ""
    return _at(file, tree, where, f"'{_dotted(where)}': {message}{more}",
               "see docs/inventory.schema.json for what may stand here")


def _exists(tree: Any, part: str | int, loc: tuple[str | int, ...]) -> bool:
    """Pydantic puts names of union members into a location; only real keys and indices are kept."""
    node = tree
    for step in loc:
        here = step in node if isinstance(node, Mapping) else isinstance(node, list) and isinstance(step, int)
        if step is part:
            return here
        if here and (isinstance(node, Mapping) or len(node) > int(step)):
            node = node[step]
    return False


def _allowed(where: Path_) -> list[str]:
    """Keys that the mapping holding this key may have."""
    models: dict[str, Any] = {"workload": Workload, "timeouts": Timeouts, "lab": LabSpec, "defaults": HostSpec}
    holder = where[-2] if len(where) > 1 else None
    if holder is None:
        return list(Document.model_fields)
    if where[0] == "profiles":
        return list(Workload.model_fields)
    return list(models.get(str(holder), HostSpec).model_fields)


def _line(tree: Any, where: Path_) -> int | None:
    """Line (from 1) of the deepest part of a location that stands in the file."""
    node, line = tree, None
    for step in where:
        position = getattr(node, "lc", None)
        try:
            if isinstance(node, Mapping) and step in node and position is not None:
                line = position.key(step)[0] + 1
            elif isinstance(node, list) and isinstance(step, int) and position is not None:
                line = position.item(step)[0] + 1
            else:
                continue
        except (KeyError, TypeError, AttributeError):
            pass  # merged in through an anchor: it has no place of its own
        node = node[step]
    return line


def _at(file: Path, tree: Any, where: Path_, message: str, hint: str) -> InventoryError:
    line = _line(tree, where)
    return InventoryError(f"{file}:{line or 1}: {message}", file=str(file), line=line or 1, key=_dotted(where),
                          hint=hint)


def _dotted(where: Path_) -> str:
    return ".".join(str(part) for part in where)


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return "did you mean " + " or ".join(f"'{name}'" for name in close) + "?" if close else ""

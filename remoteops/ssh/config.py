"""ssh_config as OpenSSH reads it: Host, Match, Include, first value wins, tokens.

Own code because nothing else does it: paramiko's reader knows no Include and drops half of the options Fabric passes
on, and ``ssh -G`` cannot say which values were set and which are defaults, nor where. Tests compare it with ``ssh -G``.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from remoteops.errors import InventoryError
from remoteops.ssh.known_hosts import glob_matches
from remoteops.ssh.words import split_words

SYSTEM = "/etc/ssh/ssh_config"
USER = "~/.ssh/config"
_DEPTH = 16
_EXEC_TIMEOUT = 10  # seconds for the command of a `Match exec`
_WHOLE_LINE = {"proxycommand", "remotecommand", "localcommand", "knownhostscommand"}
_MANY = {"identityfile", "certificatefile", "sendenv"}  # every line counts; of all others the first
# Options that would change whom we talk to, or whether we get in, and that we do not carry out.
UNSUPPORTED: Mapping[str, str] = {
    "knownhostscommand": "host keys come from files only",
    "canonicalizehostname": "names are not canonicalized",
    "pkcs11provider": "smart cards work through ssh-agent: ssh-add -s PROVIDER",
    "securitykeyprovider": "security keys work through ssh-agent: ssh-add FILE",
    "gssapiauthentication": "Kerberos logins are not supported",
    "hostbasedauthentication": "host-based logins are not supported",
    "verifyhostkeydns": "SSHFP records are not looked up",
    "proxyusefdpass": "proxy commands must carry the bytes themselves",
    "bindinterface": "use BindAddress",
    "casignaturealgorithms": "any signature that the authority's key can make is accepted",
    "requiredrsasize": "RSA keys of any size are accepted",
    "remotecommand": "remoteops runs its own commands",
}
_HARMLESS_VALUES = {"no", "none", "false", "0"}
_KNOWN = {
    *UNSUPPORTED,
    "addkeystoagent", "addressfamily", "batchmode", "bindaddress", "canonicaldomains", "canonicalizefallbacklocal",
    "canonicalizemaxdots", "canonicalizepermittedcnames", "certificatefile", "channeltimeout", "checkhostip",
    "ciphers", "clearallforwardings", "compression", "connectionattempts", "connecttimeout", "controlmaster",
    "controlpath", "controlpersist", "dynamicforward", "enableescapecommandline", "enablesshkeysign", "escapechar",
    "exitonforwardfailure", "fingerprinthash", "forkafterauthentication", "forwardagent", "forwardx11",
    "forwardx11timeout", "forwardx11trusted", "gatewayports", "globalknownhostsfile", "gssapidelegatecredentials",
    "hashknownhosts", "hostbasedacceptedalgorithms", "hostkeyalgorithms", "hostkeyalias", "hostname",
    "identitiesonly", "identityagent", "identityfile", "ignoreunknown", "include", "ipqos",
    "kbdinteractiveauthentication", "kbdinteractivedevices", "kexalgorithms", "localcommand", "localforward",
    "loglevel", "logverbose", "macs", "nohostauthenticationforlocalhost", "numberofpasswordprompts",
    "obscurekeystroketiming", "passwordauthentication", "permitlocalcommand", "permitremoteopen", "port",
    "preferredauthentications", "proxycommand", "proxyjump", "pubkeyacceptedalgorithms", "pubkeyauthentication",
    "rekeylimit", "remoteforward", "requesttty", "revokedhostkeys", "sendenv", "serveralivecountmax",
    "serveraliveinterval", "sessiontype", "setenv", "stdinnull", "streamlocalbindmask", "streamlocalbindunlink",
    "stricthostkeychecking", "syslogfacility", "tag", "tcpkeepalive", "tunnel", "tunneldevice", "updatehostkeys",
    "user", "userknownhostsfile", "versionaddendum", "visualhostkey", "xauthlocation",
    "challengeresponseauthentication", "pubkeyacceptedkeytypes", "usekeychain", "warnweakcrypto", "refuseconnection",
}  # fmt: skip


@dataclass
class Options:
    """What holds for one host: ``values`` by lower-case keyword (words), ``where`` each came from, ``notices``."""

    alias: str
    values: dict[str, list[str]] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def text(self, key: str) -> str | None:
        words = self.values.get(key)
        return words[0] if words else None

    def words(self, key: str) -> list[str]:
        return list(self.values.get(key, ()))

    def flag(self, key: str) -> bool | None:
        """yes or no; None when it is not set."""
        value = self.text(key)
        return None if value is None else value.lower() in ("yes", "true", "1")

    def number(self, key: str) -> float | None:
        """Seconds or a count. Raises InventoryError for what is no number (ssh's 1h30m times are read)."""
        value = self.text(key)
        if value is None or value.lower() == "none":
            return None
        parts = re.fullmatch(r"(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", value.lower())
        if not parts or not value:
            raise InventoryError(
                f"{self.where.get(key, 'ssh_config')}: {key} is no number: {value}", hint="repair ssh_config", key=key
            )
        return float(
            sum(int(part or 0) * unit for part, unit in zip(parts.groups(), (604800, 86400, 3600, 60, 1), strict=True))
        )


class SshConfig:
    """The files that count: one named file alone, or the user's and then the system's. Raises InventoryError."""

    def __init__(self, path: str | None = None) -> None:
        if path is not None:
            if not os.path.exists(os.path.expanduser(path)):
                raise InventoryError(
                    f"there is no ssh_config at {path}", key="ssh_config", hint="correct ssh_config in the inventory"
                )
            self._files = [(os.path.expanduser(path), os.path.expanduser("~/.ssh"))]
        else:
            self._files = [(os.path.expanduser(USER), os.path.expanduser("~/.ssh")), (SYSTEM, "/etc/ssh")]

    def lookup(
        self, alias: str, *, user: str | None = None, hostname: str | None = None, port: int | None = None
    ) -> Options:
        """The options for a name as typed after ``ssh``; the arguments are what was set before any file."""
        options = Options(alias)
        for key, value in (("user", user), ("hostname", hostname), ("port", port)):
            if value is not None:
                options.values[key] = [str(value)]
        reader = _Reader(options, final=False)
        for file, base in self._files:
            reader.file(file, base, 0, True)
        if reader.wants_final:
            # As ssh does: the second pass cannot change the address any more.
            options.values["hostname"] = [expand_hostname(options).replace("%", "%%")]
            again = _Reader(options, final=True)
            for file, base in self._files:
                again.file(file, base, 0, True)
        self._note_unsupported(options)
        return options

    @staticmethod
    def _note_unsupported(options: Options) -> None:
        for key, why in UNSUPPORTED.items():
            value = options.text(key)
            # What a distribution sets for everybody is nothing that this user relies on.
            stock = options.where.get(key, "").startswith("/etc/ssh/") and key in (
                "gssapiauthentication",
                "hostbasedauthentication",
            )
            if value is not None and value.lower() not in _HARMLESS_VALUES and not stock:
                options.notices.append(f"{options.where[key]}: {key} is not supported: {why}")


class _Reader:
    def __init__(self, options: Options, *, final: bool) -> None:
        self._options = options
        self._final = final
        self._ignored: list[str] = []
        self.wants_final = False
        # In the second pass lines that may repeat were read already.
        self._closed = {key for key in _MANY if final and key in options.values}

    def file(self, file: str, base: str, depth: int, active: bool) -> None:
        try:
            text = Path(file).read_text("utf-8", "surrogateescape")
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise InventoryError(
                f"{file} cannot be read: {error.strerror}",
                file=file,
                hint="repair it, or set ssh_config in the inventory to another file (/dev/null for none)",
            ) from None
        if depth >= _DEPTH:
            raise InventoryError(
                f"{file}: Include goes more than {_DEPTH} files deep", file=file, hint="a file may include itself"
            )
        here = active
        for number, line in enumerate(text.split("\n"), 1):
            here = self._line(line, file, number, base, depth, active, here)

    def _line(self, line: str, file: str, number: int, base: str, depth: int, outer: bool, here: bool) -> bool:
        """Take one line; gives whether the lines after it are active."""
        where = f"{file}:{number}"
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            return here
        parts = re.match(r"\"?([A-Za-z0-9]+)\"?(?:\s*=\s*|\s+|$)(.*)", stripped, re.DOTALL)
        if parts is None:
            raise InventoryError(
                f"{where}: no option: {stripped[:60]}", file=file, line=number, hint="repair ssh_config"
            )
        key, rest = parts.group(1).lower(), parts.group(2).strip()
        try:
            words = [rest] if key in _WHOLE_LINE else split_words(rest)
        except ValueError as error:
            raise InventoryError(
                f"{where}: {error}", file=file, line=number, key=key, hint="repair ssh_config"
            ) from None
        if not words or not (words[0] or key in ("setenv", "sendenv")):
            raise InventoryError(
                f"{where}: {parts.group(1)} has no value", file=file, line=number, key=key, hint="repair ssh_config"
            )
        if key == "host":
            # In its second pass ssh compares Host lines with the address that the first one found.
            name = expand_hostname(self._options) if self._final else self._options.alias
            return outer and host_matches(words, name)
        if key == "match":
            return self._match(words, where, outer) and outer
        if key == "include":
            for pattern in words:
                self._include(pattern, base, depth, here)
            return here
        if here:
            self._set(key, words, where)
        return here

    def _include(self, pattern: str, base: str, depth: int, active: bool) -> None:
        path = os.path.expanduser(pattern)
        path = _environment(path) if "${" in path else path
        for file in sorted(glob.glob(path if os.path.isabs(path) else os.path.join(base, path))):
            self.file(file, base, depth + 1, active)

    def _set(self, key: str, words: list[str], where: str) -> None:
        options = self._options
        key = {
            "challengeresponseauthentication": "kbdinteractiveauthentication",
            "pubkeyacceptedkeytypes": "pubkeyacceptedalgorithms",
        }.get(key, key)
        if key == "ignoreunknown":
            self._ignored += [item.lower() for word in words for item in word.split(",")]
        if key not in _KNOWN and not any(glob_matches(pattern, key) for pattern in self._ignored):
            notice = f"{where}: unknown option {key}"
            if notice not in options.notices:
                options.notices.append(notice)
        # Whichever of the two comes first decides about the way.
        if key in ("proxyjump", "proxycommand") and {"proxyjump", "proxycommand"} & options.values.keys():
            return
        if key == "sendenv":
            if key not in self._closed:
                present = options.values.setdefault(key, [])
                for word in words:
                    if word.startswith("-"):
                        present[:] = [name for name in present if not glob_matches(word[1:], name)]
                    else:
                        present.append(word)
        elif key in _MANY:
            if key not in self._closed and words[0] not in options.values.setdefault(key, []):
                options.values[key].append(words[0])
        else:
            options.values.setdefault(key, words)
        options.where.setdefault(key, where)

    def _match(self, words: list[str], where: str, active: bool) -> bool:
        result = True
        rest = iter(words)
        for word in rest:
            negated, name = word.startswith("!"), word.lstrip("!").lower()
            name, _, attached = name.partition("=") if "=" in name else (name, "", "")
            if name in ("all", "canonical", "final"):
                if name == "final":
                    self.wants_final = True
                matched = True if name == "all" else self._final
            else:
                argument = word.split("=", 1)[1] if attached else next(rest, None)
                if argument is None:
                    raise InventoryError(f"{where}: Match {name} has no value", hint="repair ssh_config")
                # Commands run only where they can still matter, as ssh does it.
                matched = active and result and self._criterion(name, argument, where)
            result = result and (matched is not negated)
        return result

    def _criterion(self, name: str, argument: str, where: str) -> bool:
        options = self._options
        local_user = getpass.getuser()
        if name == "host":
            return host_matches(argument.split(","), expand_hostname(options))
        if name == "originalhost":
            return host_matches(argument.split(","), options.alias)
        if name == "user":
            return host_matches(argument.split(","), options.text("user") or local_user)
        if name == "localuser":
            return host_matches(argument.split(","), local_user)
        if name == "tagged":
            return host_matches(argument.split(","), options.text("tag") or "")
        if name == "exec":
            try:
                command = expand(argument, options)
                return (
                    subprocess.run(
                        ["/bin/sh", "-c", command],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        timeout=_EXEC_TIMEOUT,
                    ).returncode
                    == 0
                )
            except subprocess.TimeoutExpired:
                options.notices.append(
                    f"{where}: the command of Match exec took more than {_EXEC_TIMEOUT} s and counts as no"
                )
                return False
        notice = f"{where}: Match {name} is not supported, and counts as no match"
        if notice not in options.notices:
            options.notices.append(notice)
        return False


def host_matches(patterns: list[str], name: str) -> bool:
    """ssh's pattern lists: one must match, and none that begins with ``!``."""
    found = False
    for pattern in patterns:
        negated = pattern.startswith("!")
        if glob_matches((pattern[1:] if negated else pattern).lower(), name.lower()):
            if negated:
                return False
            found = True
    return found


def expand_hostname(options: Options) -> str:
    """The address: HostName with its %h, or the name itself."""
    text = options.text("hostname") or options.alias
    return re.sub(r"%(.)", lambda part: options.alias if part.group(1) == "h" else "%", text)


def tokens(options: Options) -> Iterator[tuple[str, str]]:
    """ssh's %-tokens for a host, except %C and %K which need more."""
    local = socket.gethostname()
    yield from {
        "h": expand_hostname(options),
        "n": options.alias,
        "p": options.text("port") or "22",
        "r": options.text("user") or getpass.getuser(),
        "u": getpass.getuser(),
        "d": os.path.expanduser("~"),
        "i": str(os.getuid()),
        "l": local,
        "L": local.split(".")[0],
        "k": options.text("hostkeyalias") or expand_hostname(options),
        "j": options.text("proxyjump") or "",
        "%": "%",
    }.items()


def expand(text: str, options: Options) -> str:
    """Put in tokens. Raises InventoryError for one that ssh does not know."""
    known = dict(tokens(options))

    def one(part: re.Match[str]) -> str:
        if part.group(1) == "C":
            import hashlib

            joined = known["l"] + known["h"] + known["p"] + known["r"] + known["j"]
            return hashlib.sha1(joined.encode(), usedforsecurity=False).hexdigest()
        if part.group(1) not in known:
            raise InventoryError(
                f"ssh_config: there is no token %{part.group(1)} (in {text!r})", hint="repair ssh_config"
            )
        return known[part.group(1)]

    return re.sub(r"%(.?)", one, text, flags=re.DOTALL)


def expand_path(text: str, options: Options) -> str:
    """A path with ~, ${NAME} and tokens put in."""
    return expand(os.path.expanduser(_environment(text)), options)


def _environment(text: str) -> str:
    def one(part: re.Match[str]) -> str:
        value = os.environ.get(part.group(1))
        if value is None:
            raise InventoryError(
                f"ssh_config: the environment has no {part.group(1)} (in {text!r})", hint="set it, or repair ssh_config"
            )
        return value

    return re.sub(r"\$\{([^}]*)\}", one, text)

"""Which way of outliving the operator's logout this host offers, and the best of them.

* A session of its own (setsid) outlives the link everywhere, except where logind ends a user's processes at logout
  (KillUserProcesses=yes).
* A scope under the user's service manager outlives that too, but only while the user lingers: without lingering the
manager itself ends
  with the last session and takes the scope along.
* A scope under the system's service manager (root only) outlives every logout.

A scope also gives the run a control group of its own.
"""

from __future__ import annotations

import glob
import os
import pwd
import re
import shutil
import subprocess
from typing import Any, Dict, List, NamedTuple, Optional


class Way(NamedTuple):
    """``name`` is what users read, ``prefix`` what comes before the keeper's command line, ``warning`` what may end
    the run."""

    name: str
    prefix: List[str]
    env: Dict[str, str]
    warning: str = ""


def kills_at_logout(root: str = "/") -> bool:
    """Whether logind is told to end a user's processes at logout (the last setting in its files counts; default no)."""
    files = [os.path.join(root, "etc/systemd/logind.conf")]
    for folder in ("usr/lib", "run", "etc"):
        files += sorted(glob.glob(os.path.join(root, folder, "systemd/logind.conf.d/*.conf")))
    value = "no"
    for path in files:
        try:
            with open(path, encoding="utf-8", errors="replace") as stream:
                for found in re.findall(r"^\s*KillUserProcesses\s*=\s*(\S+)", stream.read(), re.M):
                    value = found.lower()
        except OSError:
            continue
    return value in ("yes", "true", "1", "on")


def lingers(user: str, root: str = "/") -> bool:
    """Whether the user's service manager stays after the last logout."""
    return os.path.exists(os.path.join(root, "var/lib/systemd/linger", user))


def _works(prefix: List[str], env: Dict[str, str]) -> bool:
    try:
        done = subprocess.run(
            [*prefix, "true"],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def choose(unit: str, *, root: str = "/", uid: Optional[int] = None) -> Way:
    """The best way there is now; every candidate is tried with a harmless command before it is chosen."""
    uid = os.getuid() if uid is None else uid
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    tool = shutil.which("systemd-run")
    managed = os.path.isdir(os.path.join(root, "run/systemd/system"))
    kills = managed and kills_at_logout(root) and uid != 0
    if tool and managed:
        common = ["--quiet", "--collect"]
        if uid == 0:
            prefix = [tool, "--scope", *common]
            if _works([*prefix, "--unit", unit + "-probe"], {}):
                return Way("systemd-run --scope", [*prefix, "--unit", unit], {})
        elif lingers(user, root):
            env = {"XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR") or "/run/user/%d" % uid}
            prefix = [tool, "--user", "--scope", *common]
            if _works([*prefix, "--unit", unit + "-probe"], env):
                return Way("systemd-run --user --scope", [*prefix, "--unit", unit], env)
    warning = ""
    if kills:
        warning = (
            "this host ends a user's processes at logout (KillUserProcesses=yes), %s does not linger: the run may die "
            "with your last session; `loginctl enable-linger %s` prevents it" % (user, user)
        )
    return Way("setsid", [], {}, warning)


def describe(*, root: str = "/") -> Dict[str, Any]:
    """What a probe of the host shows: {"managed", "kills_at_logout", "lingers"}."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return {
        "managed": os.path.isdir(os.path.join(root, "run/systemd/system")),
        "kills_at_logout": kills_at_logout(root),
        "lingers": lingers(user, root),
    }

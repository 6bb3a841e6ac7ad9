"""What is on this host: interpreter, user, memory, disks, GPUs and who uses them, the venv and its packages."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple

    from remoteops.agent.protocol import Emitter

_GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "driver_version",
    "compute_cap",
)
_TIMEOUT = 20  # seconds for nvidia-smi: on a host with a broken driver it can hang


def hello(request: Dict[str, Any], emit: Emitter) -> Dict[str, Any]:
    """Who answers: {"python", "executable", "platform", "user", "host", "home", "archive", "pid"}."""
    entry = sys.argv[0]
    return {
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "platform": sys.platform,
        "user": _user(),
        "host": os.uname().nodename,
        "home": os.path.expanduser("~"),
        "archive": entry if entry.endswith(".pyz") else os.path.dirname(entry) + ".pyz",
        "pid": os.getpid(),
    }


def facts(request: Dict[str, Any], emit: Emitter) -> Dict[str, Any]:
    """Everything in one answer; each part is {"error": why} where it cannot be had.

    request: ``paths`` (folders whose free space matters), ``venv`` (its packages are listed), ``packages`` (names to
    list; without it all). Sizes are bytes.
    """
    import platform

    paths = [request.get("state_dir"), request.get("cache_dir"), *(request.get("paths") or [])]
    return {
        **hello(request, emit),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": memory(),
        "disks": [disk(path) for path in paths if path],
        "gpus": gpus(),
        "venv": venv(request.get("venv"), request.get("packages")),
        "kernel": platform.release(),
        "libc": "-".join(platform.libc_ver()),
        "encoding": sys.getfilesystemencoding(),
    }


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())  # a uid without a passwd entry, as in containers


def memory() -> Dict[str, Any]:
    """{"total", "available", "shm_free"}: bytes of main memory, and of /dev/shm, which torch workers need."""
    found: Dict[str, Any] = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            for line in stream:
                name, _, value = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[{"MemTotal": "total", "MemAvailable": "available"}[name]] = int(value.split()[0]) * 1024
    except OSError as error:
        found["error"] = str(error)
    try:
        values = os.statvfs("/dev/shm")
        found["shm_free"] = values.f_bavail * values.f_frsize
    except OSError:
        found["shm_free"] = None
    return found


def disk(path: str) -> Dict[str, Any]:
    """{"path", "exists", "free", "total", "inodes_free", "writable", "read_only"} of the nearest folder that exists."""
    asked = os.path.abspath(os.path.expanduser(path))
    real = asked
    while not os.path.isdir(real) and real != "/":
        real = os.path.dirname(real)
    try:
        values = os.statvfs(real)
    except OSError as error:
        return {"path": asked, "error": str(error)}
    return {
        "path": asked,
        "exists": real == asked,
        "free": values.f_bavail * values.f_frsize,
        "total": values.f_blocks * values.f_frsize,
        "inodes_free": values.f_favail,
        "writable": os.access(real, os.W_OK),
        "read_only": bool(values.f_flag & os.ST_RDONLY),
    }


def gpus() -> Dict[str, Any]:
    """{"cards": [{"index", "uuid", "name", "memory_total", "memory_used", "utilization", …}], "processes": [...]}."""
    import shutil

    tool = shutil.which("nvidia-smi") or shutil.which(
        "nvidia-smi", path="/usr/bin:/usr/local/bin:/usr/local/nvidia/bin"
    )
    if tool is None:
        return {"cards": [], "processes": [], "error": "nvidia-smi is not in PATH"}
    rows, error = _query(tool, "--query-gpu=" + ",".join(_GPU_FIELDS))
    if error:
        return {"cards": [], "processes": [], "error": error}
    cards = []
    for row in rows:
        values = dict(zip(_GPU_FIELDS, row))
        cards.append(
            {
                "index": _number(values.get("index")),
                "uuid": values.get("uuid"),
                "name": values.get("name"),
                "memory_total": _mebibytes(values.get("memory.total")),
                "memory_used": _mebibytes(values.get("memory.used")),
                "utilization": _number(values.get("utilization.gpu")),
                "driver": values.get("driver_version"),
                "compute_capability": values.get("compute_cap"),
            }
        )
    rows, _ = _query(tool, "--query-compute-apps=gpu_uuid,pid,used_memory,process_name")
    processes = [
        {
            "gpu_uuid": row[0],
            "pid": _number(row[1]),
            "memory": _mebibytes(row[2]),
            "name": ",".join(row[3:]),
            "user": _owner(_number(row[1])),
        }
        for row in rows
        if len(row) >= 4
    ]
    return {"cards": cards, "processes": processes}


def _query(tool: str, what: str) -> Tuple[List[List[str]], Optional[str]]:
    import subprocess

    try:
        done = subprocess.run(
            [tool, what, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return [], "nvidia-smi hangs (%d s): the driver is stuck" % _TIMEOUT
    except OSError as error:
        return [], "nvidia-smi: %s" % error
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        return [], "nvidia-smi: " + " ".join(text.split())[:300]
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()], None


def _number(text: Optional[str]) -> Optional[int]:
    try:
        return int(float(text or ""))
    except ValueError:
        return None  # "[N/A]", as on cards that share memory with the host


def _mebibytes(text: Optional[str]) -> Optional[int]:
    number = _number(text)
    return None if number is None else number * 1024 * 1024


def _owner(pid: Optional[int]) -> Optional[str]:
    try:
        uid = os.stat("/proc/%d" % pid).st_uid if pid else None
    except OSError:
        return None
    if uid is None:
        return None
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def venv(path: Optional[str], packages: Optional[List[str]] = None) -> Dict[str, Any]:
    """{"path", "python", "version", "site_packages": [...], "packages": {name: version}}, read from its files alone."""
    if not path:
        return {"path": None}
    root = os.path.abspath(os.path.expanduser(path))
    python = os.path.join(root, "bin", "python")
    if not os.path.exists(python):
        return {
            "path": root,
            "error": "there is no bin/python in it" if os.path.isdir(root) else "there is no such folder",
        }
    folders = site_packages(root)
    wanted = {_normal(name) for name in packages} if packages else None
    found: Dict[str, str] = {}
    for folder in folders:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                label, _, version = name.rsplit(".", 1)[0].partition("-")
                label = _normal(label)
                if wanted is None or label in wanted:
                    found.setdefault(label, version.split("-py")[0])
    return {
        "path": root,
        "python": python,
        "version": _config(root).get("version") or _config(root).get("version_info"),
        "site_packages": folders,
        "packages": found,
    }


def site_packages(root: str) -> List[str]:
    """The folders a venv imports installed packages from: its own, its base's where pyvenv.cfg says so, and those
    that .pth files name."""
    from remoteops.agent.audit import packages
    from remoteops.agent.protocol import AgentError

    try:
        found = packages.site_folders(root)
    except AgentError:
        return []
    linked = [path for folder in found for path in packages.path_files(folder) if os.path.isdir(path)]
    return list(dict.fromkeys([*found, *linked]))


def _config(root: str) -> Dict[str, str]:
    try:
        with open(os.path.join(root, "pyvenv.cfg"), encoding="utf-8", errors="replace") as stream:
            pairs = (line.partition("=") for line in stream)
            return {key.strip().lower(): value.strip() for key, _, value in pairs}
    except OSError:
        return {}


def _normal(name: str) -> str:
    import re

    return re.sub(r"[-_.]+", "-", name).lower()

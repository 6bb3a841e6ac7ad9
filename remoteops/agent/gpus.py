"""What the GPUs hold and do: through the driver's own library (NVML), else through nvidia-smi's CSV.

NVML costs well under a millisecond a look and no process; nvidia-smi costs a process and up to a second, so callers
that look often ask ``cheap`` first. No GPU and no driver is an ordinary answer: [].
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from typing import Any, Dict, List, Optional

_LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-ml.so")
_MISSING = (1 << 64) - 1
"""NVML's "not available" for a process' memory (as in some containers)."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _ProcessV2(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute", ctypes.c_uint),
    ]


class Nvml:
    """A session with the driver's library. Raises OSError when there is none or it does not start."""

    def __init__(self) -> None:
        library: Optional[ctypes.CDLL] = None
        for name in _LIBRARIES:
            try:
                library = ctypes.CDLL(name)
                break
            except OSError:
                continue
        if library is None:
            raise OSError("no NVML library")
        self._library = library
        if library.nvmlInit_v2() != 0:
            raise OSError("NVML does not start")
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            raise OSError("NVML does not count devices")
        self._handles: List[ctypes.c_void_p] = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                self._handles.append(handle)

    def devices(self) -> List[Dict[str, Any]]:
        """[{"index", "name", "uuid", "memory_used", "memory_total" (bytes), "utilization" (percent or None)}]"""
        found = []
        for index, handle in enumerate(self._handles):
            memory, use = _Memory(), _Utilization()
            if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
                continue
            used = self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0
            found.append(
                {
                    "index": index,
                    "name": self._text("nvmlDeviceGetName", handle),
                    "uuid": self._text("nvmlDeviceGetUUID", handle),
                    "memory_used": memory.used,
                    "memory_total": memory.total,
                    "utilization": use.gpu if used else None,
                }
            )
        return found

    def processes(self) -> List[Dict[str, Any]]:
        """[{"gpu", "pid", "memory" (bytes or None)}] of every compute process the driver shows."""
        found = []
        for index, handle in enumerate(self._handles):
            count = ctypes.c_uint(256)
            rows = (_ProcessV2 * 256)()
            call = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
            if call is None or call(handle, ctypes.byref(count), rows) != 0:
                continue
            for row in rows[: count.value]:
                found.append(
                    {"gpu": index, "pid": int(row.pid), "memory": None if row.used == _MISSING else int(row.used)}
                )
        return found

    def _text(self, function: str, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(96)
        return (
            buffer.value.decode("utf-8", "replace") if getattr(self._library, function)(handle, buffer, 96) == 0 else ""
        )


def _smi(query: str) -> List[List[str]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    return [
        [cell.strip() for cell in line.split(",")]
        for line in done.stdout.decode("utf-8", "replace").splitlines()
        if line.strip()
    ]


def _number(text: str, scale: int = 1) -> Optional[int]:
    try:
        return int(float(text) * scale)
    except ValueError:
        return None


class Gpus:
    """The host's GPUs. ``cheap`` says whether looking every few seconds is fine."""

    def __init__(self) -> None:
        self._nvml: Optional[Nvml] = None
        try:
            self._nvml = Nvml()
        except (OSError, AttributeError):
            pass
        self.cheap = self._nvml is not None
        self.present = self.cheap or shutil.which("nvidia-smi") is not None

    def devices(self) -> List[Dict[str, Any]]:
        """As Nvml.devices."""
        if self._nvml is not None:
            return self._nvml.devices()
        found = []
        for row in _smi("--query-gpu=index,name,uuid,memory.used,memory.total,utilization.gpu"):
            if len(row) == 6:
                found.append(
                    {
                        "index": _number(row[0]),
                        "name": row[1],
                        "uuid": row[2],
                        "memory_used": _number(row[3], 1 << 20),
                        "memory_total": _number(row[4], 1 << 20),
                        "utilization": _number(row[5]),
                    }
                )
        return found

    def processes(self) -> List[Dict[str, Any]]:
        """As Nvml.processes."""
        if self._nvml is not None:
            return self._nvml.processes()
        index = {device["uuid"]: device["index"] for device in self.devices()}
        found = []
        for row in _smi("--query-compute-apps=gpu_uuid,pid,used_memory"):
            if len(row) == 3 and row[1].isdigit():
                found.append({"gpu": index.get(row[0]), "pid": int(row[1]), "memory": _number(row[2], 1 << 20)})
        return found


def visible(setting: Optional[str], devices: List[Dict[str, Any]]) -> List[int]:
    """Indexes of the devices that a CUDA_VISIBLE_DEVICES value lets a process use (None: all of them)."""
    if setting is None or not setting.strip():
        return [device["index"] for device in devices]
    chosen = []
    for item in (part.strip() for part in setting.split(",")):
        for device in devices:
            if item == str(device["index"]) or (item and not item.isdigit() and str(device["uuid"]).startswith(item)):
                chosen.append(device["index"])
    return chosen

"""Every error that a user can meet.

    RemoteOpsError                     exit
    ├── UsageError                     2   an argument or a request that makes no sense
    │   ├── InventoryError             2   inventory.yaml: file, line and key
    │   └── UnknownHost                2   no such name in the inventory
    ├── LinkError                      3   could not reach or ask the host
    │   ├── Unreachable                3   no TCP connection, no banner, no name
    │   ├── HostKeyUnknown             3   first contact; says the command that accepts the key
    │   ├── HostKeyChanged             3   always refused
    │   ├── HostKeyRevoked             3   always refused
    │   ├── AuthFailed                 3   says what was tried and what the server allows
    │   ├── LinkTimeout                3   a bounded step (banner, channel, silence) ran out of time
    │   ├── ConnectionLost             3   the link died under a verb
    │   ├── SessionRefused             3   no command can be run: MaxSessions, a shell or sudo that refuses, sftp only
    │   ├── CommandFailed              3   a command of ours ended with an exit status or a signal
    │   ├── NoInterpreter              3   no usable python3 on the host
    │   ├── TransferFailed             3   an upload or download broke or did not match its checksum
    │   └── AgentCrashed               3   the agent met a defect of ours
    ├── HostStateError                 1   the host answers, and what it has is not enough
    │   ├── MissingVenv                1
    │   ├── MissingPackage             1
    │   ├── MissingModel               1
    │   ├── DiskTooSmall               1
    │   ├── GpuBusy                    1
    │   ├── RunActive                  1   a run is going already
    │   ├── RunNotFound                1
    │   ├── PreflightFailed            1
    │   ├── DatasetError               1   the dataset is missing, unreadable, or too much of it had to be dropped
    │   ├── OutputMismatch             1   the output folder holds another run's data; names what changed
    │   └── LabError                   1   the embedded host could not be built or started
    ├── AuditBroken                    1   the libraries will not work together
    ├── PatchError                     1   a patch could not be planned, applied or proved
    │   ├── AnchorNotFound             1   the place an edit looks for is missing or ambiguous
    │   ├── FileChanged                1   the file is not the one that was audited
    │   └── PatchLocked                1   another operator is patching
    ├── RunFailed                      1
    ├── VerifyFailed                   1
    ├── Defect                         3   a defect of remoteops on the operator's side
    └── Interrupted                    130

Each error names the host, what was tried and what to do next; ``str(error)`` is what a user reads.
"""
from __future__ import annotations

from typing import Any, ClassVar


class RemoteOpsError(Exception):
    """Base of all errors.

    Parameters: ``message`` (what is wrong), ``host`` (its name in the inventory, or None), ``tried`` (what was
    attempted), ``hint`` (what to do next), ``data`` (anything machine-readable; shown with --json).
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, host: str | None = None, tried: str = "", hint: str = "", **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.host = host
        self.tried = tried
        self.hint = hint
        self.data = data

    def __str__(self) -> str:
        lines = [f"{self.host}: {self.message}" if self.host else self.message]
        if self.tried:
            lines.append(f"  tried: {self.tried}")
        if self.hint:
            lines.append(f"  do: {self.hint}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The error as a JSON document (schema remoteops.error/1)."""
        return {"schema": "remoteops.error/1", "kind": type(self).__name__, "message": self.message, "host": self.host,
                "tried": self.tried, "hint": self.hint, "data": self.data, "exit_code": self.exit_code}


class UsageError(RemoteOpsError):
    exit_code = 2


class InventoryError(UsageError):
    pass


class UnknownHost(UsageError):
    pass


class LinkError(RemoteOpsError):
    exit_code = 3


class Unreachable(LinkError):
    pass


class HostKeyUnknown(LinkError):
    pass


class HostKeyChanged(LinkError):
    pass


class HostKeyRevoked(LinkError):
    pass


class AuthFailed(LinkError):
    pass


class LinkTimeout(LinkError):
    pass


class ConnectionLost(LinkError):
    pass


class SessionRefused(LinkError):
    pass


class CommandFailed(LinkError):
    """A command of ours failed. ``data`` has ``argv``, ``exit_status``, ``exit_signal``, ``stderr`` (its tail)."""


class NoInterpreter(LinkError):
    pass


class TransferFailed(LinkError):
    pass


class AgentCrashed(LinkError):
    pass


class HostStateError(RemoteOpsError):
    pass


class MissingVenv(HostStateError):
    pass


class MissingPackage(HostStateError):
    pass


class MissingModel(HostStateError):
    pass


class DiskTooSmall(HostStateError):
    pass


class GpuBusy(HostStateError):
    pass


class RunActive(HostStateError):
    pass


class RunNotFound(HostStateError):
    pass


class PreflightFailed(HostStateError):
    pass


class DatasetError(HostStateError):
    pass


class OutputMismatch(HostStateError):
    pass


class LabError(HostStateError):
    pass


class AuditBroken(RemoteOpsError):
    pass


class PatchError(RemoteOpsError):
    pass


class AnchorNotFound(PatchError):
    pass


class FileChanged(PatchError):
    pass


class PatchLocked(PatchError):
    pass


class RunFailed(RemoteOpsError):
    pass


class VerifyFailed(RemoteOpsError):
    pass


class Defect(RemoteOpsError):
    exit_code = 3


class Interrupted(RemoteOpsError):
    exit_code = 130


def by_kind(kind: str) -> type[RemoteOpsError]:
    """The class of an agent's error event; an unknown name (an agent that lies or is newer) is the base class."""
    found = globals().get(kind)
    return found if isinstance(found, type) and issubclass(found, RemoteOpsError) else RemoteOpsError

"""Furnishes the embedded host over its own link: conversations up, models made there. Nothing goes around the link."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from remoteops.errors import CommandFailed, LabError
from remoteops.lab.place import HERE, Place, Report

if TYPE_CHECKING:
    from remoteops.inventory import Host

MODEL_SCRIPT = HERE / "model.py"


def conversations_file() -> Path:
    """The conversations that come with remoteops: beside the package in a checkout, inside it when installed."""
    package = HERE.parent
    for candidate in (package / "examples", package.parent / "examples"):
        if (candidate / "conversations.jsonl").is_file():
            return candidate / "conversations.jsonl"
    raise LabError(
        "the example conversations are missing",
        host="lab",
        tried=str(package.parent / "examples"),
        hint="reinstall remoteops, or use a whole checkout",
    )


def wanted(place: Place) -> str:
    """Fingerprint of what the home should hold; differs when the conversations, the script or the venv changed."""
    digest = hashlib.sha256(str(place.state().get("venv")).encode())
    for file in (MODEL_SCRIPT, conversations_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def ensure(place: Place, host: Host, report: Report) -> None:
    """Upload and generate what is missing. ``host`` is the lab as an ordinary SSH host. Raises LabError, LinkError."""
    goal = wanted(place)
    if place.state().get("furnished") == goal:
        return
    from remoteops.transport import connect

    report("making the tiny models on the host (about 15 s)")
    with connect(host) as link:
        data, models = f"{place.home}/data", f"{place.home}/models"
        link.exec(["mkdir", "-p", data, models, f"{place.home}/.cache"])
        link.upload(conversations_file(), f"{data}/conversations.jsonl")
        link.upload(MODEL_SCRIPT, f"{place.home}/.cache/model.py")
        try:
            link.exec(
                [str(place.python), f"{place.home}/.cache/model.py", f"{data}/conversations.jsonl", models],
                env={"TOKENIZERS_PARALLELISM": "false"},
                timeout=600,
            )
        except CommandFailed as error:
            raise LabError(
                "the tiny models could not be made",
                host="lab",
                tried="remoteops/lab/model.py on the host",
                hint=str(error.data.get("stderr") or error)[-800:],
            ) from None
    place.remember(furnished=goal)
    report("models and conversations are on the host")

"""The door: one agent, shipped once, asked in one round trip; a host that lies gets a typed error and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import sshd
from hypothesis import given, settings
from hypothesis import strategies as st

from remoteops import archive, remote
from remoteops.agent import quickjson
from remoteops.agent.protocol import READS
from remoteops.errors import (
    AgentCrashed,
    ConnectionLost,
    LinkError,
    LinkTimeout,
    NoInterpreter,
    RemoteOpsError,
    TransferFailed,
    UsageError,
)
from remoteops.inventory import Host
from remoteops.remote import Agent, open_agent
from remoteops.ssh.baselink import BaseLink

pytestmark = pytest.mark.timeout(60)
# Interpreters to try the agent with: those in PATH, and those that REMOTEOPS_TEST_PYTHONS lists (as PATH does).
PYTHONS = [
    Path(found)
    for minor in range(8, 16)
    if (found := shutil.which(f"python3.{minor}", path=os.environ.get("REMOTEOPS_TEST_PYTHONS") or None))
    and not subprocess.run(
        [found, "-S", "-c", ""], capture_output=True
    ).returncode  # a version manager's stub may not run
]


@pytest.fixture
def own(tmp_path) -> Iterator[sshd.Sshd]:
    """A server whose home this test may change."""
    with sshd.running(tmp_path / "s") as running:
        yield running


def archives(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.rglob("agent-*") if item.is_file())


def test_the_archive_is_shipped_once_and_only_when_it_changes(own, monkeypatch):
    cache = own.home / ".cache/remoteops"
    with open_agent(own.host()) as agent:
        first = agent.call("hello", {})
        assert archives(own.home) == [archive.build().name] and agent.host_path == str(cache / archive.build().name)
        assert first["archive"] == agent.host_path and agent.python.startswith("/")
    written = (cache / archive.build().name).stat()
    with open_agent(own.host()) as agent:
        agent.call("hello", {})
        agent.call("hello", {})
    again = (cache / archive.build().name).stat()
    assert (written.st_ino, written.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    assert hashlib.sha256((cache / archive.build().name).read_bytes()).hexdigest() == archive.build().sha256


def test_the_archive_is_the_same_whatever_the_files_times_and_order(tmp_path):
    built = archive.build()
    os.utime(Path(archive.__file__).parent / "agent/protocol.py")
    assert archive.build.__wrapped__() == built
    names = zipfile.ZipFile(__import__("io").BytesIO(built.data)).namelist()
    assert names == sorted(names) and "remoteops/agent/protocol.py" in names and "__main__.py" in names
    assert not [
        name
        for name in names
        if not name.startswith("remoteops/agent/") and name not in ("__main__.py", "remoteops/__init__.py")
    ]


def test_a_damaged_archive_is_replaced(own):
    with open_agent(own.host()) as agent:
        path = Path(agent.host_path)
    path.write_bytes(b"garbage")
    with open_agent(own.host()) as agent:
        assert agent.call("hello", {})["pid"]
    assert path.read_bytes() == archive.build().data


def test_an_archive_that_vanishes_between_two_calls_is_shipped_again(own):
    with open_agent(own.host()) as agent:
        os.unlink(agent.host_path)
        assert agent.call("hello", {})["pid"]


def test_a_home_that_cannot_be_written_does_not_stop_the_agent(tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with (
        sshd.running(tmp_path / "s", environment={"TMPDIR": str(temporary)}) as own,
        open_agent(own.host(cache_dir="/proc/nothing/here")) as agent,
    ):
        agent.call("hello", {})
        folder = Path(agent.host_path).parent
        assert folder == temporary / f"remoteops-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700


def test_no_folder_at_all_is_an_error_that_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "OTHER_FOLDERS", ("/proc/no", "/sys/no"))
    with sshd.running(tmp_path / "s") as own, open_agent(own.host(cache_dir="/proc/nothing")) as agent:
        with pytest.raises(TransferFailed, match="/proc/nothing") as caught:
            agent.call("hello", {})
        assert "cache_dir" in str(caught.value)


def path_without_python(tmp_path: Path, *extra: str) -> str:
    """A PATH with what sh needs, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name in ("sh", "id", "mkdir", "chmod", "cat", "wc", "sha256sum", "cut", "mv", "rm", "df", "awk", "tail", "tee"):
        for place in ("/bin", "/usr/bin"):
            if os.path.exists(f"{place}/{name}") and not (folder / name).exists():
                (folder / name).symlink_to(f"{place}/{name}")
    return str(folder)


def test_no_interpreter_says_what_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(
        remote,
        "START",
        remote.START.replace("/usr/bin/python3", "/nowhere/python3").replace("/usr/local/bin/python3", "/nowhere/3"),
    )
    with sshd.running(tmp_path / "s", environment={"PATH": path_without_python(tmp_path)}) as own:
        with open_agent(own.host()) as agent, pytest.raises(NoInterpreter, match=r"python3\.14") as caught:
            agent.call("hello", {})
        assert "python:" in str(caught.value)
        with (
            open_agent(own.host(python="/no/such/python")) as agent,
            pytest.raises(NoInterpreter, match="/no/such/python"),
        ):
            agent.call("hello", {})
        with open_agent(own.host(python=sys.executable)) as agent:
            assert agent.python == sys.executable
        venv = tmp_path / "venv/bin"
        venv.mkdir(parents=True)
        (venv / "python").symlink_to(sys.executable)
        with open_agent(own.host(venv=str(tmp_path / "venv"))) as agent:
            assert agent.call("hello", {})["pid"]


def test_an_interpreter_that_is_too_old_is_passed_over(tmp_path):
    folder = path_without_python(tmp_path)
    old = Path(folder) / "python3"
    old.write_text("#!/bin/sh\necho 'Python 3.6 is too old' >&2; exit 69\n")
    old.chmod(0o755)
    (Path(folder) / "python3.12").symlink_to(sys.executable)
    with sshd.running(tmp_path / "s", environment={"PATH": folder}) as own, open_agent(own.host()) as agent:
        assert agent.python.endswith("python3.12") and agent.call("hello", {})["pid"]


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.name)
def test_every_python_since_3_9_runs_the_agent(server, python):
    minor = int(
        subprocess.run([python, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, check=True).stdout
    )
    with open_agent(server.host(python=str(python))) as agent:
        if minor < 9:
            with pytest.raises(NoInterpreter):
                agent.call("facts", {})
        else:
            assert agent.call("facts", {})["python"].startswith(f"3.{minor}.")


def test_a_bare_environment_and_odd_names_are_no_trouble(tmp_path):
    script = tmp_path / "bare"
    script.write_text(
        '#!/bin/sh\necho banner; cd /; exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    script.chmod(0o755)
    with sshd.running(tmp_path / "s", options=[f"ForceCommand {script}"]) as own:
        folder = own.home / "it's é \\ $x"
        folder.mkdir()
        with open_agent(own.host(cache_dir=str(folder))) as agent:
            answer = agent.call("facts", {"paths": [str(folder), "/nö/such"]})
            assert (
                answer["encoding"] == "utf-8"
                and answer["disks"][2]["path"] == str(folder)
                and answer["disks"][2]["exists"]
            )


def test_errors_of_the_agent_come_as_their_class(server):
    with open_agent(server.host()) as agent, pytest.raises(UsageError, match="no verb 'nonsense'"):
        agent.call("nonsense", {})


def test_facts_see_a_venv_by_its_files_alone(server, tmp_path):
    site = tmp_path / "venv/lib/python3.11/site-packages"
    (site / "vllm-0.17.1.dist-info").mkdir(parents=True)
    (site / "Speculators-0.3.0.dist-info").mkdir()
    (tmp_path / "venv/bin").mkdir()
    (tmp_path / "venv/bin/python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "venv/pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.2\n")
    # A .pth file shares the packages of another folder, as images with a ready torch do.
    (tmp_path / "shared/torch-2.11.0+cu130.dist-info").mkdir(parents=True)
    (tmp_path / "shared/vllm-0.1.dist-info").mkdir()
    (site / "shared.pth").write_text(f"import nothing\n# a remark\n{tmp_path}/shared\n{tmp_path}/gone\n")
    with open_agent(server.host(venv=str(tmp_path / "venv"))) as agent:
        venv = agent.call("facts", {})["venv"]
        assert venv["packages"] == {"vllm": "0.17.1", "speculators": "0.3.0", "torch": "2.11.0+cu130"}
        assert venv["version"] == "3.11.2"
        assert agent.call("facts", {"packages": ["VLLM"]})["venv"]["packages"] == {"vllm": "0.17.1"}
        assert agent.call("facts", {"venv": "/no/such"})["venv"]["error"]


# -- how a verb ends -------------------------------------------------------------------------------------------------


@pytest.fixture
def verbs(monkeypatch, tmp_path) -> Path:
    """An agent with verbs of this test's own: they note in a file how they ended."""
    built = archive.build()
    source = Path(archive.__file__).parent
    import io

    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(built.data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "remoteops/agent/__main__.py":
                data = data.replace(b"VERBS: Dict[str, str] = {", b'VERBS: Dict[str, str] = {"looks": "remoteops.agent.odd:looks", '  # noqa: E501
                                    b'"changes": "remoteops.agent.odd:changes", "dies": "remoteops.agent.odd:dies",')  # fmt: skip  # noqa: E501
            if name == "remoteops/agent/protocol.py":
                data = data.replace(b"frozenset(\n    {", b'frozenset(\n    {"looks", "dies", ').replace(
                    b"frozenset({", b'frozenset({"looks", "dies", '
                )
            new.writestr(name, data)
        new.writestr("remoteops/agent/odd.py", ODD)
    assert source
    data = buffer.getvalue()
    odd = archive.Archive("agent-odd.pyz", data, hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(archive, "build", lambda: odd)
    return tmp_path / "note"


ODD = """
import os, signal, time
def looks(request, emit):
    try:
        for number in range(1000):
            emit("tick", number=number)
            time.sleep(30 if request.get("blocks") else 0.02)
    finally:
        with open(request["note"], "w") as note:
            note.write("ended")
def changes(request, emit):
    emit("tick", number=0)
    time.sleep(1.5)
    emit("tick", number=1)
    with open(request["note"], "w") as note:
        note.write("whole " + str(emit.gone.is_set()))
    return {}
def dies(request, emit):
    emit("tick", number=0)
    os.kill(os.getpid(), getattr(signal, request["signal"]))
    time.sleep(5)
"""


def wait_for(note: Path, text: str) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if note.exists() and note.read_text() == text:
            return
        time.sleep(0.02)
    pytest.fail(f"no {text!r} in the note: {note.read_text() if note.exists() else 'not written'}")


def running(pid_text: str) -> bool:
    return bool(subprocess.run(["pgrep", "-f", pid_text], capture_output=True).stdout)


@pytest.mark.parametrize("blocks", [False, True], ids=["busy", "asleep"])
@pytest.mark.parametrize("where", ["ssh", "local"])
def test_closing_the_stream_ends_a_verb_that_only_looks(own, verbs, tmp_path, where, blocks):
    cache = tmp_path / f"cache-{where}-{blocks}"
    host = (
        own.host(cache_dir=str(cache)) if where == "ssh" else Host(name="here", connect="local", cache_dir=str(cache))
    )
    with open_agent(host) as agent:
        events = agent.stream("looks", {"note": str(verbs), "blocks": blocks})
        assert next(events)["event"] == "tick"
        events.close()
        wait_for(verbs, "ended")
        deadline = time.monotonic() + 5
        while running(f"{cache}/agent-odd.pyz") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running(f"{cache}/agent-odd.pyz")


def test_a_verb_that_changes_something_runs_to_its_end_without_its_operator(own, verbs):
    with open_agent(own.host()) as agent:
        events = agent.stream("changes", {"note": str(verbs)})
        assert next(events)["event"] == "tick"
        events.close()
        wait_for(verbs, "whole True")


def test_an_operator_that_falls_silent_is_taken_for_gone(own, verbs, monkeypatch):
    monkeypatch.setattr(remote, "WATCH", 1.0)
    monkeypatch.setattr(Agent, "_tick", staticmethod(lambda process: None))
    with open_agent(own.host()) as agent, pytest.raises((ConnectionLost, RemoteOpsError)):
        for _ in agent.stream("looks", {"note": str(verbs)}):
            pass
    wait_for(verbs, "ended")


def test_an_operator_that_only_listens_is_not_taken_for_gone(own, verbs, monkeypatch):
    monkeypatch.setattr(remote, "WATCH", 1.5)
    with open_agent(own.host(timeouts={"silence": 1})) as agent:
        started = time.monotonic()
        for _ in agent.stream("looks", {"note": str(verbs)}):
            if time.monotonic() - started > 3:
                break


@pytest.mark.parametrize(("signal", "why"), [("SIGKILL", "killed by SIGKILL"), ("SIGSEGV", "SIGSEGV")])
def test_an_agent_that_is_killed_is_no_answer_and_no_exit_code(own, verbs, monkeypatch, signal, why):
    monkeypatch.setattr(remote, "RETRY_PAUSES", ())
    with open_agent(own.host()) as agent, pytest.raises(ConnectionLost, match=why):
        agent.call("dies", {"signal": signal})


def test_a_call_that_takes_too_long_is_a_typed_error(own, verbs):
    with open_agent(own.host()) as agent, pytest.raises(LinkTimeout):
        agent.call("looks", {"note": str(verbs)}, timeout=1.0)
    wait_for(verbs, "ended")


def test_a_request_by_hand_needs_no_watching(tmp_path):
    path = tmp_path / "agent.pyz"
    path.write_bytes(archive.build().data)
    for text in (b"", b"{}", b'{\n "protocol": 1\n}\n'):
        done = subprocess.run([sys.executable, "-I", str(path), "hello"], input=text, capture_output=True, check=True)
        assert json.loads(done.stdout)["event"] == "result"
    broken = subprocess.run([sys.executable, "-I", str(path), "hello"], input=b"{nonsense", capture_output=True)
    assert json.loads(broken.stdout)["kind"] == "UsageError" and broken.returncode == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(json_values)
def test_the_quick_json_writes_and_reads_what_json_does(value):
    written = quickjson.dumps(value)
    assert written == json.dumps(value, separators=(",", ":")) and quickjson.loads(written) == value == json.loads(
        written
    )


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from('{}[]",:0123.-eEtrufalsn \\\n'), max_size=12))
def test_the_quick_json_refuses_what_json_refuses(text):
    try:
        value = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            quickjson.loads(text)
    else:
        assert quickjson.loads(text) == value


@pytest.mark.slow
def test_every_python_takes_the_quick_way_or_the_safe_one():
    script = "from remoteops.agent import quickjson as q; assert q.loads(q.dumps({'a': [1, '€']})) == {'a': [1, '€']}; print(q._dumps.__qualname__)"  # noqa: E501
    new_enough = [
        python
        for python in PYTHONS
        if not subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 9))"]).returncode
    ]
    for python in [Path(sys.executable), *new_enough]:
        done = subprocess.run(
            [python, "-S", "-c", script], cwd=Path(archive.__file__).parents[1], capture_output=True, text=True
        )
        assert done.returncode == 0 and "dumps" in done.stdout, done.stderr
        for bad in ("{x", "", "[1,]", "nul"):
            refused = subprocess.run([python, "-S", "-c", f"from remoteops.agent import quickjson as q; q.loads({bad!r})"],  # noqa: E501
                                     cwd=Path(archive.__file__).parents[1], capture_output=True, text=True)  # fmt: skip
            assert "JSONDecodeError" in refused.stderr


def test_the_table_of_repeatable_verbs_holds_no_verb_that_changes_the_host():
    from remoteops.agent.__main__ import VERBS

    assert set(VERBS) >= READS
    assert not [verb for verb in READS if verb.split(".")[-1] in ("apply", "revert", "start", "stop")]


# -- a host that lies ------------------------------------------------------------------------------------------------


class Lying(BaseLink):
    """A link to a host that answers with given bytes."""

    def __init__(self, chunks: Sequence[bytes], status: int | None = 0) -> None:
        self.host = Host(name="liar", connect="local")
        self.description = "a liar"
        self.chunks = chunks
        self.status = status

    def start(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Talk:
        return Talk(list(self.chunks), self.status)

    def upload(self, *args: object, **kwargs: object) -> str:
        return ""


class Talk:
    def __init__(self, chunks: list[bytes], status: int | None) -> None:
        self.chunks = chunks
        self.exit_status = status
        self.exit_signal = None

    def send(self, data: bytes) -> bool:
        return True

    def finish_input(self) -> None:
        pass

    def read(self, timeout: float | None = None) -> tuple[bytes, bytes] | None:
        return (self.chunks.pop(0), b"") if self.chunks else None

    def close(self) -> None:
        self.chunks.clear()


def ask(*chunks: bytes) -> dict:
    return Agent(Lying(chunks)).call("hello", {})


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=6))
def test_any_bytes_for_events_end_in_a_typed_error(chunks):
    with pytest.raises(RemoteOpsError):
        ask(*chunks)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
fields = st.fixed_dictionaries(
    {"event": st.sampled_from(["result", "error", "progress"]) | anything},
    optional={"kind": st.sampled_from(["HostKeyChanged", "Interrupted", "Exception", "__builtins__"]) | anything, "message": anything,  # noqa: E501
              "tried": anything, "hint": anything, "data": anything, "host": anything},
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(fields, min_size=1, max_size=4))
def test_any_events_end_in_a_result_or_a_typed_error(events):
    lines = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    try:
        assert isinstance(ask(lines), dict)
    except RemoteOpsError as error:
        assert str(error) and isinstance(error.as_dict()["data"], dict)


def test_a_stream_that_ends_without_a_result_means_that_the_link_was_lost():
    with pytest.raises(ConnectionLost, match="without an answer"):
        ask(b'{"event":"progress","t":1}\n')


def test_an_endless_line_is_stopped(monkeypatch):
    monkeypatch.setattr(remote, "MAX_EVENT", 100_000)
    with pytest.raises(AgentCrashed, match="more than"):
        ask(*[b"x" * 50_000] * 1000)


def test_a_deep_or_bloated_event_is_refused(monkeypatch):
    with pytest.raises(AgentCrashed, match="no event"):
        ask(b'{"event":"result","data":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    monkeypatch.setattr(remote, "MAX_VALUES", 1000)
    with pytest.raises(AgentCrashed, match="too many values"):
        ask(b'{"event":"result","data":[' + b"[]," * 5000 + b"0]}\n")


def test_an_agent_that_never_starts_is_an_error_and_no_loop():
    with pytest.raises(AgentCrashed, match="does not start"):
        ask()
    with pytest.raises(LinkError):
        ask(b"need-archive\n")
    with pytest.raises(NoInterpreter):
        ask(b"no-interpreter\n")


def test_escape_sequences_in_an_error_of_the_host_are_neutralised_when_shown(capsys):
    from remoteops.console import Console

    try:
        ask(
            json.dumps({"event": "error", "kind": "RunFailed", "message": "\x1b]0;owned\x07\x1b[2Jgone"}).encode()
            + b"\n"
        )
    except RemoteOpsError as error:
        Console().error(error)
    shown = capsys.readouterr()
    assert "\x1b" not in shown.err + shown.out and "owned" in shown.err

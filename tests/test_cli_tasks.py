"""`fab` and `remoteops`: the same tasks, exit codes, and never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from remoteops import cli
from remoteops.command import Command, guarded
from remoteops.console import Console
from tests.lab_fixtures import ROOT, fab

TASKS = cli.load_tasks().ns


def remoteops(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """The console script in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(ROOT)
    code = 0
    try:
        cli.main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_fab_and_remoteops_list_the_same_tasks(tmp_path: Path) -> None:
    mine = fab("--list", program="remoteops", cwd=tmp_path)
    theirs = fab("--list")
    assert mine.code == theirs.code == 0
    assert mine.out.split("\n", 1)[1] == theirs.out.split("\n", 1)[1]
    for name in ("probe", "patch", "extract", "tail-logs", "lab.up"):
        assert f"  {name} " in mine.out


def test_every_task_and_every_option_has_a_help_text() -> None:
    for name in TASKS.task_names:
        task = TASKS[name]
        assert isinstance(task, Command)
        assert (task.__doc__ or "").strip(), name
        for argument in task.get_arguments():
            assert argument.help, f"{name} --{argument.name}"
            assert all(len(flag) > 1 for flag in argument.names), f"{name} has a one-letter flag"


MISTAKES = [
    (["nosuch"], "there is no task 'nosuch'"),
    (["prob"], "did you mean 'probe'?"),
    (["hosts", "--flag", "garbage"], "there is no option '--flag'"),
    (["extract", "--samples", "ten"], "--samples takes a whole number, not 'ten'"),
    (["stop", "--grace", "soon"], "--grace takes a number, not 'soon'"),
    (["extract", "--samples"], "--samples needs a value"),
    (["hosts", "nosuch"], "no host 'nosuch'"),
    (["-H", "nosuch", "status"], "no host 'nosuch'"),
    (["-H", "lab,nosuch", "runs"], "no host 'nosuch'"),
    (["lab.up", "--profile", "nosuch"], "profiles: seed, current"),
    (["audit", "speculators==0.3.0"], "did not receive required positional arguments"),
    (["tail-logs", "--lines", "few"], "--lines takes a number or 'all'"),
    (["tail-logs", "--since", "yesterday"], "--since does not understand 'yesterday'"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: " ".join(value)[:40])
def test_a_mistake_on_the_command_line_is_one_message_and_exit_code_2(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "inventory.yaml").write_text("hosts:\n  lab:\n    address: 127.0.0.1\n    port: 1\n")
    monkeypatch.setenv("REMOTEOPS_INVENTORY", str(tmp_path / "inventory.yaml"))
    code, out, err = remoteops(capsys, monkeypatch, *arguments)
    assert code == 2
    assert words in err
    assert out == ""


def test_stock_fab_ends_a_mistake_the_same_way(tmp_path: Path) -> None:
    for arguments, words in (MISTAKES[2], MISTAKES[3], MISTAKES[7]):
        done = fab(*arguments)
        assert done.code == 2
        assert words in done.err


def test_with_json_an_error_is_a_document_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = remoteops(capsys, monkeypatch, "hosts", "nosuch", "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == 2
    assert (document["schema"], document["kind"]) == ("remoteops.error/1", "UnknownHost")
    assert document["hint"]
    assert err == ""


@pytest.mark.parametrize(
    "arguments", [["hosts", "--json", "--garbage"], ["nosuch", "--json"], ["runs", "--json", "--limit", "few"]]
)
def test_with_json_a_command_line_that_cannot_be_read_is_a_document_too(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = remoteops(capsys, monkeypatch, *arguments)
    document = json.loads(out)
    assert code == document["exit_code"] == 2
    assert document["kind"] == "UsageError"
    assert err == ""


def test_hosts_shows_only_the_hosts_of_capital_h(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "inventory.yaml").write_text(
        "hosts:\n  one: {address: h1}\n  two: {address: h2}\n  three: {address: h3}\ngroups: {pair: [one, two]}\n"
    )
    monkeypatch.setenv("REMOTEOPS_INVENTORY", str(tmp_path / "inventory.yaml"))
    for named, names in (("pair", ["one", "two"]), ("three", ["three"]), ("all", ["one", "two", "three"])):
        _, out, _ = remoteops(capsys, monkeypatch, "-H", named, "hosts", "--json")
        assert [entry["name"] for entry in json.loads(out)["hosts"]] == names


def test_a_document_can_be_written_where_stdout_is_not_utf_8(tmp_path: Path) -> None:
    script = "from remoteops.console import Console; Console(json=True).document({'file': 'caf\\u00e9 \\udcff'})"
    for encoding in ("ascii", "latin-1", "utf-8"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )
        assert json.loads(done.stdout.decode(encoding)) == {"file": "caf\u00e9 \udcff"}


def test_a_place_here_that_cannot_be_written_is_no_defect(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")

    def write() -> None:
        (tmp_path / "file" / "folder").mkdir(parents=True)

    assert guarded(Console(), write) == 2
    err = capsys.readouterr().err
    assert err.startswith("UsageError: ") and "Not a directory" in err and "defect" not in err


def test_a_reader_that_goes_away_is_a_quiet_end() -> None:
    script = (
        "import sys; from remoteops.command import guarded; from remoteops.console import Console; c = Console()\n"
        "def talk():\n    while True: c.say('x' * 5000)\n"
        "sys.exit(guarded(c, talk))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_an_unreachable_host_is_told_and_exit_code_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "inventory.yaml").write_text("hosts:\n  gpu:\n    address: 127.0.0.1\n    port: 1\n")
    monkeypatch.setenv("REMOTEOPS_INVENTORY", str(tmp_path / "inventory.yaml"))
    for task in ("probe", "status", "runs", "extract --samples 1", "patch --status", "pull", "shell true"):
        code, _, err = remoteops(capsys, monkeypatch, *task.split())
        assert code == 3, task
        assert err.startswith("Unreachable: gpu: ") and "\n  do: " in err, task


def test_several_hosts_are_asked_once_each_and_the_worst_code_wins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "inventory.yaml").write_text(
        "hosts:\n  here: {connect: local}\n  dead: {address: 127.0.0.1, port: 1}\ngroups: {both: [here, dead]}\n"
    )
    monkeypatch.setenv("REMOTEOPS_INVENTORY", str(tmp_path / "inventory.yaml"))
    for named in ("here,dead", "both", "all", "both,here"):
        code, out, _ = remoteops(capsys, monkeypatch, "-H", named, "shell", "echo one; exit 0", "--json")
        document = json.loads(out)
        assert code == 3
        assert [entry["host"] for entry in document["hosts"]] == ["here", "dead"]


def test_a_command_after_two_dashes_goes_through_the_verified_link(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "inventory.yaml").write_text("hosts:\n  here: {connect: local}\n")
    monkeypatch.setenv("REMOTEOPS_INVENTORY", str(tmp_path / "inventory.yaml"))
    code, out, _ = remoteops(capsys, monkeypatch, "-H", "here", "--", "echo", "$((6*7));", "exit", "5")
    assert (code, out) == (5, "42\n")


def test_without_H_a_task_aims_at_the_inventorys_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "inventory.yaml").write_text(
        "default: b\nhosts:\n  a: {connect: local}\n  b: {address: 127.0.0.1, port: 1}\n"
    )
    monkeypatch.setenv("REMOTEOPS_INVENTORY", str(tmp_path / "inventory.yaml"))
    code, _, err = remoteops(capsys, monkeypatch, "shell", "true")
    assert (code, err.split(":")[1].strip()) == (3, "b")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("status abc", "status --run abc"),
        ("status --watch abc", "status --watch --run abc"),
        ("tail-logs --lines 5 abc", "tail-logs --lines 5 --run abc"),
        ("tail-logs --lines=5 abc", "tail-logs --lines=5 --run abc"),
        ("tail-logs abc --lines 5", "tail-logs --run abc --lines 5"),
        ("status runs", "status runs"),
        ("status --run runs", "status --run runs"),
        ("probe extra", "probe extra"),
        ("lab.up status", "lab.up status"),
        ("status a b", "status --run a --run b"),
    ],
)
def test_a_run_may_be_named_without_its_flag(tokens: str, expected: str) -> None:
    assert cli.with_flags(tokens.split(), TASKS) == expected.split()


def test_a_defect_ends_without_a_traceback_and_keeps_one_in_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from remoteops import hosts

    monkeypatch.setattr(hosts, "describe", lambda *_: 1 / 0)
    code, _, err = remoteops(capsys, monkeypatch, "hosts")
    assert code == 3
    assert "a defect of remoteops: ZeroDivisionError" in err
    assert "Traceback" not in err
    kept = Path(err.split("please report it with ")[1].split()[0])
    assert "ZeroDivisionError" in kept.read_text()
    kept.unlink()


def test_an_audit_that_found_no_package_is_no_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = ["--consumer-path", str(tmp_path), "--provider-path", str(tmp_path)]
    code, out, _ = remoteops(capsys, monkeypatch, "audit", "--consumer", "a", "--provider", "b", *paths, "--json")
    assert code == 2  # 1 says that the two will not work together
    document = json.loads(out)
    assert document["schema"] == "remoteops.error/1" and document["exit_code"] == 2
    assert "package a is not installed" in document["message"]


def test_ctrl_c_ends_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from remoteops import hosts

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hosts, "describe", interrupted)
    assert remoteops(capsys, monkeypatch, "hosts")[0] == 130


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = Path(sys.executable).with_name("fab")
    line = f"{script} hosts --json | head -c 1"
    done = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_text_from_a_host_cannot_steer_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "inventory.yaml").write_text('hosts:\n  here: {connect: local, address: "a\\e]0;x\\ab\\u202e"}\n')
    monkeypatch.setenv("REMOTEOPS_INVENTORY", str(tmp_path / "inventory.yaml"))
    _, out, err = remoteops(capsys, monkeypatch, "hosts", "\x1b[2Jnosuch")
    assert "\x1b" not in out + err
    assert "\\x1b[2Jnosuch" in err


@pytest.mark.slow
def test_an_installed_package_brings_tasks_inventory_and_examples(tmp_path: Path) -> None:
    """A wheel holds what a checkout has in its root; the console script works without a checkout."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    build = (
        [uv, "build", "--wheel", "-q", "-o", str(tmp_path), str(ROOT)]
        if uv
        else [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    )
    made = subprocess.run(build, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    wheel = next(tmp_path.glob("remoteops-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert {
        "remoteops/tasks.py",
        "remoteops/inventory.yaml",
        "remoteops/examples/conversations.jsonl",
        "remoteops/lab/profiles.yaml",
        "remoteops/lab/seed.txt",
        "remoteops/agent/__main__.py",
    } <= names
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from remoteops.cli import main; main(['hosts', '--json'])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["default"] == "lab"
    assert json.loads(done.stdout)["file"].startswith(str(tmp_path / "site"))

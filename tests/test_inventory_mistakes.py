"""Every mistake in inventory.yaml is told with file, line and key, and with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from remoteops.errors import InventoryError, UnknownHost
from remoteops.inventory import load

# text, line, key, words of the message, words of the hint
MISTAKES = [
    ("hosts:\n  a:\n    adress: x\n", 3, "hosts.a.adress", "unknown key", "'address'"),
    ("hosts:\n  a:\n    zzz: x\n", 3, "hosts.a.zzz", "unknown key", "known keys here: address, cache_dir"),
    ("host:\n  a: {}\n", 1, "host", "unknown key", "'hosts'"),
    ("hosts:\n  a:\n    workload:\n      modle: x\n", 4, "hosts.a.workload.modle", "unknown key", "'model'"),
    ("hosts:\n  a:\n    timeouts: {conect: 3}\n", 3, "hosts.a.timeouts.conect", "unknown key", "'connect'"),
    ("profiles:\n  p:\n    modle: x\nhosts: {a: {}}\n", 3, "profiles.p.modle", "unknown key", "'model'"),
    ("defaults:\n  usr: x\nhosts: {a: {}}\n", 2, "defaults.usr", "unknown key", "'user'"),
    ("hosts:\n  a:\n    port: true\n", 3, "hosts.a.port", "valid integer", ""),
    ("hosts:\n  a:\n    port: '22'\n", 3, "hosts.a.port", "valid integer", ""),
    ("hosts:\n  a:\n    port: 70000\n", 3, "hosts.a.port", "less than or equal to 65535", ""),
    ("hosts:\n  a:\n    host_key: off\n", 3, "hosts.a.host_key", "'strict' or 'accept-new'", ""),
    ("hosts:\n  a:\n    timeouts:\n      silence: 0\n", 4, "hosts.a.timeouts.silence", "greater than 0", ""),
    ("hosts:\n  a:\n    identity_files: [1]\n", 3, "hosts.a.identity_files.0", "valid string", ""),
    ("hosts:\n  a:\n    workload: {tensor_parallel: 0}\n", 3, "hosts.a.workload.tensor_parallel", "greater than", ""),
    ("hosts:\n  a: 3\n", 2, "hosts.a", "valid dictionary", ""),
    ("hosts:\n  -oProxyCommand=x: {}\n", 2, "hosts.-oProxyCommand=x", "no usable host name", "keys of their own"),
    ("hosts: {}\n", 1, "hosts", "no host", "add one"),
    ("hosts:\n  a:\ndefault: b\n", 3, "default", "default host 'b'", ""),
    ("hosts:\n  gpu1:\ngroups:\n  g: [gpu1, gpu2]\n", 4, "groups.g.1", "names 'gpu2'", "'gpu1'"),
    ("hosts:\n  a:\ngroups:\n  a: [a]\n", 4, "groups.a", "both a host and a group", "rename"),
    ("hosts:\n  all:\n", 2, "hosts.all", "stands for every host", "rename"),
    (
        "profiles: {tiny: {}}\nhosts:\n  a:\n    workload:\n      profile: tinny\n",
        5,
        "hosts.a.workload.profile",
        "no workload profile 'tinny'",
        "'tiny'",
    ),
    ("hosts:\n  a:\n    password: x\n", 3, "hosts.a.password", "secret", "SSH agent"),
    ("hosts:\n  a:\n    env:\n      HF_TOKEN: abc\n", 4, "hosts.a.env.HF_TOKEN", "secret", "environment"),
    ("hosts:\n  a:\n    env: {X: hf_abcdefghijklmnopqrstuvwxyz}\n", 3, "hosts.a.env.X", "secret", ""),
    ("hosts:\n  a:\n    address: ssh://me:pw@host\n", 3, "hosts.a.address", "secret", ""),
    (
        "hosts:\n  a:\n    identity_files: |\n      -----BEGIN OPENSSH PRIVATE KEY-----\n      xyz\n",
        3,
        "hosts.a.identity_files",
        "secret",
        "key file",
    ),
    ("", 1, None, "empty", "hosts"),
    ("- a\n", 1, None, "no mapping", "hosts"),
    ("hosts:\n\ta: 1\n", 2, None, "cannot start any token", "spaces"),
    ("hosts:\n  a: {}\n  a: {}\n", 3, None, "duplicate key", "remove one"),
    ("hosts:\n  a: [1\n", 3, None, "expected", "indentation"),
    ("hosts:\n  a: *nobody\n", 2, None, "alias", ""),
    ("hosts:\n  a: !!python/object:os.system {}\n", 2, "hosts.a", "", ""),
]


@pytest.mark.parametrize(("text", "line", "key", "message", "hint"), MISTAKES, ids=lambda value: repr(value)[:40])
def test_a_mistake_is_told_with_line_and_key(
    tmp_path: Path, text: str, line: int, key: str | None, message: str, hint: str
) -> None:
    file = tmp_path / "inventory.yaml"
    file.write_text(text, encoding="utf-8")
    if text.startswith("hosts:\n  a: !!python"):
        # A tag is ignored, never executed: the value is an empty mapping.
        assert load(file).host("a").name == "a"
        return
    with pytest.raises(InventoryError) as caught:
        load(file)
    error = caught.value
    assert error.exit_code == 2
    assert str(error).startswith(f"{file}:{line}: ")
    assert (error.data["file"], error.data["line"], error.data["key"]) == (str(file), line, key)
    assert message in error.message
    assert hint in error.hint


def test_a_secret_is_never_repeated_in_the_message(tmp_path: Path) -> None:
    file = tmp_path / "inventory.yaml"
    file.write_text("hosts:\n  a:\n    env:\n      API_KEY: swordfish\n", encoding="utf-8")
    with pytest.raises(InventoryError) as caught:
        load(file)
    assert "swordfish" not in str(caught.value) + repr(caught.value.as_dict())


def test_a_value_of_the_wrong_type_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "inventory.yaml"
    file.write_text("hosts:\n  a:\n    port: [swordfish]\n", encoding="utf-8")
    with pytest.raises(InventoryError) as caught:
        load(file)
    assert "swordfish" not in str(caught.value)


def test_a_missing_file_and_one_that_is_no_text_are_told(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="cannot be read: No such file"):
        load(tmp_path / "nothing.yaml")
    file = tmp_path / "inventory.yaml"
    file.write_bytes(b"hosts:\n  a:\n    user: \xff\n")
    with pytest.raises(InventoryError, match=r":3: not UTF-8"):
        load(file)


def test_a_document_that_would_grow_without_bound_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    file = tmp_path / "inventory.yaml"
    file.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(InventoryError):
        load(file)


def test_an_unknown_host_gets_the_nearest_names(tmp_path: Path) -> None:
    file = tmp_path / "inventory.yaml"
    file.write_text("hosts: {gpu-a: {}, gpu-b: {}}\ngroups: {gpus: [gpu-a, gpu-b]}\n", encoding="utf-8")
    inventory = load(file)
    with pytest.raises(UnknownHost, match="'gpu-b' or 'gpu-a'"):
        inventory.host("gpu-c")
    with pytest.raises(UnknownHost, match="is a group of 2 hosts"):
        inventory.host("gpus")
    with pytest.raises(UnknownHost, match="add it under 'hosts:'"):
        inventory.host("something")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=200) | st.text(alphabet="ahost:s {}[]&*!|>-\n\t'\"#%@,", max_size=200))
@example(":")
def test_no_text_leads_to_any_other_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "inventory.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load(file)
    except InventoryError as error:
        assert error.hint or error.message


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["port", "user", "jump", "env", "timeouts", "workload", "identity_files", "lab", "venv"]), _VALUES
)
def test_no_value_leads_to_any_other_error(tmp_path: Path, key: str, value: object) -> None:
    import json

    file = tmp_path / "inventory.yaml"
    file.write_text(json.dumps({"hosts": {"a": {key: value}}}), encoding="utf-8")
    try:
        load(file)
    except InventoryError as error:
        assert error.data["line"] == 1

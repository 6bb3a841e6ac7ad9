"""The house as DESIGN draws it: which module may know which, how large one may be, and that the docs tell the truth."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remoteops import cli

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "remoteops"
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"torch", "vllm", "speculators", "transformers", "safetensors", "datasets", "pyarrow", "numpy", "tokenizers"}
# What may be imported of remoteops, by prefix of the importing module; the first match counts.
SHOWS = {"remoteops.dialogs", "remoteops.command", "remoteops.cli", "remoteops.fleet"}
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"])


def name_of(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether it is imported when the module is) of every import; those for types only are left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for child in branch.body
        for node in ast.walk(child)
    }
    top = {id(node) for node in tree.body} | {
        id(n) for t in tree.body if isinstance(t, ast.Try | ast.If) for n in t.body
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, id(node) in top


AGENT = [file for file in MODULES if "agent" in file.parts]
EXTRACTION = PACKAGE / "agent" / "extraction"


@pytest.mark.parametrize("file", AGENT, ids=name_of)
def test_the_agent_imports_only_the_standard_library_and_itself(file: Path) -> None:
    for module, line, _ in imports(file):
        first = module.split(".")[0]
        if first == "remoteops":
            assert module == "remoteops" or module.startswith("remoteops.agent"), f"{file}:{line} imports {module}"
        elif first not in sys.stdlib_module_names:
            assert EXTRACTION in file.parents and first in HEAVY, f"{file}:{line} imports {module}"


def test_what_needs_torch_to_load_is_loaded_by_nothing_that_runs_without_it() -> None:
    known = {name_of(file): [module for module, _, at_load in imports(file) if at_load] for file in AGENT}
    heavy = {name for name, found in known.items() if any(module.split(".")[0] in HEAVY for module in found)}
    for _ in known:
        heavy |= {name for name, found in known.items() if any(_is_or_is_in(module, heavy) for module in found)}
    assert all(name.startswith("remoteops.agent.extraction.") for name in heavy), heavy
    assert "remoteops.agent.extraction.__main__" not in heavy


def _is_or_is_in(module: str, names: set[str]) -> bool:
    return module in names or module.rpartition(".")[0] in names


@pytest.mark.parametrize("file", [f for f in MODULES if "agent" in f.parts], ids=name_of)
def test_the_agent_is_python_3_9(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, 9))
    if text.strip() and any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body):
        assert "from __future__ import annotations" in text


@pytest.mark.parametrize("file", [f for f in MODULES if "agent" not in f.parts], ids=name_of)
def test_arrows_go_one_way(file: Path) -> None:
    name = name_of(file)
    for module, line, _ in imports(file):
        where = f"{file.relative_to(ROOT)}:{line}"
        if module.startswith("remoteops.console") and not name.startswith("remoteops.console"):
            assert name in SHOWS, f"{where}: only tasks and what serves them may show things, not {name}"
        if module.startswith(("remoteops.dialogs", "remoteops.command", "remoteops.cli")):
            assert name in SHOWS, f"{where}: {name} knows the command line"
        if name.startswith("remoteops.ssh"):
            known = ("remoteops.ssh", "remoteops.errors", "remoteops.inventory", "remoteops.schema")
            assert not module.startswith("remoteops") or module.startswith(known), f"{where}: {module}"
        if name.startswith("remoteops.edits"):
            assert not module.startswith(("remoteops.remote", "remoteops.transport", "remoteops.ssh")), where
        assert module.split(".")[0] not in HEAVY or name == "remoteops.lab.model", f"{where}: {module}"


@pytest.mark.parametrize("file", [*MODULES, ROOT / "tasks.py", *sorted((ROOT / "tests").glob("*.py"))], ids=name_of)
def test_a_module_does_one_thing_in_a_readable_size(file: Path) -> None:
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= (700 if file.parent.name == "tests" else 400)
    assert file.stem not in {"utils", "util", "helpers", "common", "misc", "manager"}


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_a_module_says_what_it_is(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree), f"{file} has no docstring"


def test_tasks_hold_no_logic() -> None:
    tree = ast.parse((ROOT / "tasks.py").read_text(encoding="utf-8"))
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            assert not isinstance(node, ast.For | ast.While | ast.Try | ast.With), f"{function.name} has logic"
    assert len((ROOT / "fabfile.py").read_text().splitlines()) == 1


def test_no_committed_file_names_a_registry_or_a_path_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    hosts = [
        ".".join(parts)
        for parts in (
            ("pypi", "org"),
            ("files", "pythonhosted", "org"),
            ("registry", "npmjs", "org"),
            ("deb", "debian", "org"),
            ("download", "pytorch", "org"),
        )
    ]
    paths = [
        "/" + "/".join(parts) for parts in (("work", "main"), ("work", "shared"), ("tmp", "brief"), ("root", ".pyenv"))
    ]
    for name in listed.stdout.decode().split("\0"):
        file = ROOT / name
        if name and file.is_file():
            text = file.read_bytes().decode("utf-8", "replace")
            found = [word for word in hosts + paths if word in text]
            assert not found, f"{name} names {found}"


# -- the docs -------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[Path, str]]:
    """Every `fab ...` and `remoteops ...` in the docs: in backquotes and in code blocks."""
    for file in DOCS:
        text = file.read_text(encoding="utf-8")
        blocks = re.findall(r"^(?: {4}|\$ |    \$ )((?:fab|remoteops) .*)$", text, flags=re.M)
        fenced = [line for block in re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.S) for line in block.splitlines()]
        blocks += [line.removeprefix("$ ").strip() for line in fenced]
        inline = re.findall(r"`((?:fab|remoteops) [^`]+)`", text)
        for line in [*blocks, *inline]:
            if re.match(r"(fab|remoteops) ", line):
                yield file, line


@pytest.mark.parametrize(("file", "line"), sorted(set(commands())), ids=lambda value: str(value).split("/")[-1])
def test_every_command_in_the_docs_can_be_typed(file: Path, line: str) -> None:
    """Task and options exist; the command is parsed by the very parser that will meet it."""
    from invoke.parser import Parser

    text = re.split(r" +# | \| | > ", line.replace(" --help", ""))[0].replace("…", "").replace("...", "")
    words = shlex.split(text)[1:]
    program = cli.Program(name="remoteops", namespace=cli.load_tasks().ns)
    core = Parser(initial=program.initial_context, ignore_unknown=True).parse_argv(words)
    rest = cli.with_flags(core.unparsed, program.namespace)
    if len(words) == 1:
        # A task's name in running text; what it needs stands in the examples.
        assert words[0] in program.namespace.task_names or words[0].startswith("-")
        return
    if not rest:
        return
    parsed = Parser(contexts=program.namespace.to_contexts()).parse_argv(rest)
    assert parsed


def test_the_runbooks_and_the_readme_name_every_task() -> None:
    text = "\n".join(file.read_text(encoding="utf-8") for file in DOCS)
    for name in cli.load_tasks().ns.task_names:
        assert f"fab {name}" in text, f"no page shows `fab {name}`"


def test_every_error_class_has_an_entry_in_troubleshooting() -> None:
    from remoteops import errors

    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    leaves = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.RemoteOpsError) and not value.__subclasses__()
    ]
    missing = [name for name in leaves if not re.search(rf"^#+ .*\b{name}\b", text, flags=re.M)]
    assert not missing


def test_the_tree_of_errors_in_the_docstring_is_the_real_one() -> None:
    from remoteops import errors

    tree = dict(re.findall(r"([A-Z]\w+) +(\d+)(?: |$)", errors.__doc__ or "", flags=re.M))
    real = {
        name: str(value.exit_code)
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.RemoteOpsError) and name != "RemoteOpsError"
    }
    assert {name: code for name, code in tree.items() if name in real} == real


def test_every_relative_link_in_the_docs_leads_somewhere() -> None:
    for file in DOCS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text(encoding="utf-8")):
            assert (file.parent / target).exists(), f"{file.relative_to(ROOT)} links to {target}"

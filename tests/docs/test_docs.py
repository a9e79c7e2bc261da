"""The documentation against the code: names that exist are described, links and blocks work."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import tomlkit

from torchtitan_npu_core import (
    ConverterSpec,
    DeviceLimit,
    KnownIssue,
    OperatorSpec,
    OptionSpec,
    hookspecs,
)
from torchtitan_npu_core.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SKIPPED = {"build", "dist", "outputs", "shared", "__pycache__"}


def markdown_files():
    found = []
    for folder, names, files in os.walk(ROOT):
        names[:] = [n for n in names if n not in SKIPPED and not n.startswith(".")]
        found += [Path(folder, file) for file in files if file.endswith(".md")]
    return sorted(found)


def relative(path):
    return str(path.relative_to(ROOT))


def blocks(path, language):
    """Contents of a file's fenced blocks of one language, with the number of their first line."""
    found, current = [], None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"\s*```(\S*)\s*$", line)
        if fence is None:
            if current is not None:
                current[2].append(line)
        elif current is None:
            current = (fence[1], number + 1, [])
        else:
            if current[0] == language:
                found.append((current[1], "\n".join(current[2]) + "\n"))
            current = None
    assert current is None, f"{relative(path)}: a block is not closed"
    return found


def block_cases(language, accept=lambda text: True):
    return [
        pytest.param(text, id=f"{relative(path)}:{line}")
        for path in markdown_files()
        for line, text in blocks(path, language)
        if accept(text)
    ]


def prose(path):
    """A file's text without its fenced blocks and inline code."""
    text = re.sub(r"(?ms)^\s*```.*?^\s*```\s*$", "", path.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]*`", "", text)


def section(path, heading):
    """Text below a second-level heading, up to the next one."""
    text = path.read_text(encoding="utf-8")
    parts = re.split(r"(?m)^## (.+)$", text)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert heading in found, f"{relative(path)} has no heading '## {heading}'"
    return found[heading]


def anchors(path):
    """Names of a file's headings in links, as GitHub makes them."""
    text = re.sub(r"(?ms)^\s*```.*?^\s*```\s*$", "", path.read_text(encoding="utf-8"))
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", t.strip().lower()).replace(" ", "-") for t in titles}


# ---------------------------------------------------------------- names


HOOKS = {n: f for n, f in vars(hookspecs).items() if n.startswith("torchtitan_npu_")}


def test_there_are_hooks_to_look_at():
    assert len(HOOKS) >= 5


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_and_argument_is_in_the_hooks_page(hook):
    text = section(DOCS / "hooks.md", hook)
    for argument in inspect.signature(HOOKS[hook]).parameters:
        assert f"| `{argument}` |" in text, f"argument {argument!r} of {hook} is not described"


def test_hooks_page_describes_no_hook_that_is_gone():
    text = (DOCS / "hooks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?m)^## (torchtitan_npu_\w+)$", text)) == set(HOOKS)


@pytest.mark.parametrize("spec", [ConverterSpec, OptionSpec, OperatorSpec, DeviceLimit, KnownIssue])
def test_every_field_of_a_declaration_is_in_the_hooks_page(spec):
    text = (DOCS / "hooks.md").read_text(encoding="utf-8")
    for field in inspect.signature(spec).parameters:
        assert f"`{field}`" in text, f"{spec.__name__}.{field} is not described"


def commands():
    context = click.Context(main)
    return {name: main.get_command(context, name) for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_its_section_of_the_commands_page(name):
    text = section(DOCS / "cli.md", name)
    assert f"torchtitan-npu {name}" in text
    for parameter in commands()[name].params:
        if isinstance(parameter, click.Argument):
            continue
        for option in parameter.opts:
            assert f"| `{option}` |" in text, f"option {option} of {name} is not described"
        for choice in getattr(parameter.type, "choices", ()):
            assert f"`{choice}`" in text, f"{name} {parameter.opts[0]} {choice} is not described"


def test_commands_page_describes_no_option_that_is_gone():
    for name, command in commands().items():
        known = {option for parameter in command.params for option in parameter.opts}
        described = set(re.findall(r"(?m)^\| `(--[\w-]+)`", section(DOCS / "cli.md", name)))
        assert described <= known, name


def test_every_environment_variable_is_in_the_configuration_page():
    text = section(DOCS / "configuration.md", "Environment variables")
    used = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        used |= set(re.findall(r"TORCHTITAN_NPU_[A-Z_]+", path.read_text(encoding="utf-8")))
    assert used
    assert set(re.findall(r"(?m)^\| `(TORCHTITAN_NPU_\w+)` \|", text)) == used


def official_converters():
    """Converters that the distributions of this repository offer, from their plugin modules."""
    found = []
    for path in sorted(ROOT.glob("packages/op-*/pyproject.toml")):
        project = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()["project"]
        for module in project["entry-points"]["torchtitan_npu.converters"].values():
            for spec in importlib.import_module(module).torchtitan_npu_converters():
                found.append((spec, str(project["name"])))
    return found


def test_there_are_converters_to_look_at():
    assert official_converters()


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
@pytest.mark.parametrize(
    ("spec", "distribution"), official_converters(), ids=lambda v: getattr(v, "name", "")
)
def test_every_converter_is_in_the_table_of_the_readme(readme, spec, distribution):
    rows = (ROOT / readme).read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in rows if line.startswith(f"| `{spec.name}` |")]
    assert f"`{distribution}`" in row
    for operator in spec.operators:
        assert f"`{operator.partition('::')[2]}`" in row, f"{operator} is missing"


@pytest.mark.parametrize(
    ("spec", "distribution"), official_converters(), ids=lambda v: getattr(v, "name", "")
)
def test_every_option_of_a_converter_is_in_the_configuration_page(spec, distribution):
    text = section(DOCS / "configuration.md", "The `[npu]` section")
    rows = [line for line in text.splitlines() if line.startswith(f"| `{spec.name}` |")]
    for option in spec.options:
        assert any(f"`{option.name}`" in row for row in rows), option.name


# ---------------------------------------------------------------- links and blocks


@pytest.mark.parametrize("path", markdown_files(), ids=relative)
def test_relative_links_resolve(path):
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(linked), f"{target}: no such heading"


@pytest.mark.parametrize("text", block_cases("toml"))
def test_toml_block_parses(text):
    tomlkit.parse(text)


@pytest.mark.parametrize("text", block_cases("python"))
def test_python_block_compiles(text):
    compile(text, "block", "exec")


def is_runnable(text):
    return text.splitlines()[:1] == ["# runnable"]


RUNNABLE = block_cases("sh", is_runnable)


def test_there_are_runnable_blocks():
    assert RUNNABLE


@pytest.mark.parametrize("text", RUNNABLE)
def test_runnable_block_runs(text, tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHTITAN_NPU_")}
    # not resolved: a virtual environment's interpreter is often a link to another folder
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["sh", "-e", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_table_of_torch_npu_releases_is_what_the_code_says():
    tool = DOCS.parent / "tools" / "compatibility_table.py"
    done = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

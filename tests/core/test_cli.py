import json

import pytest
from click.testing import CliRunner

from torchtitan_npu_core.cli import COMMANDS, main

PLUGIN = """
from torchtitan_npu_core import ConverterSpec, DeviceLimit, OperatorSpec, OptionSpec, hookimpl

@hookimpl
def torchtitan_npu_converters():
    return [ConverterSpec(
        name="acme_gelu", summary="A gelu", replaces=("torch.nn.GELU",), factory="m:C",
        operators=("acme::gelu",),
        options=(OptionSpec(name="fast", default=False, summary="go fast"),),
    )]

@hookimpl
def torchtitan_npu_operators():
    return [OperatorSpec(name="acme::gelu", schema="gelu(Tensor x) -> Tensor", kernels="m:K",
        limits=(DeviceLimit(quantity="width", families=("a2",), maximum=8, reason="small"),))]
"""
ENTRY = "[torchtitan_npu.converters]\n{} = {}\n"


@pytest.fixture
def acme(fake_distribution):
    fake_distribution(
        "acme-gelu", entry_points=ENTRY.format("gelu", "acme_gelu"), modules={"acme_gelu": PLUGIN}
    )


@pytest.fixture
def broken(fake_distribution):
    fake_distribution(
        "acme-bad", entry_points=ENTRY.format("bad", "acme_bad"), modules={"acme_bad": "1/0"}
    )


def run(*args):
    return CliRunner().invoke(main, args)


def test_list_shows_converters(acme, broken):
    result = run("list")
    assert result.exit_code == 0
    assert "acme_gelu" in result.output
    assert "(bad)" not in result.output
    assert "list --all" in result.output


def test_list_all_shows_broken_plugins_in_brackets(acme, broken):
    result = run("list", "--all")
    line = next(x for x in result.output.splitlines() if x.startswith("(bad)"))
    assert "broken" in line
    assert "ZeroDivisionError" in line


def test_list_json(acme):
    data = json.loads(run("list", "--json").output)
    assert data["schema"] == 1
    assert any(row["converter"] == "acme_gelu" for row in data["rows"])


def test_list_configs():
    result = run("list", "--configs")
    assert "quickstart" in result.output
    assert json.loads(run("list", "--configs", "--json").output)["rows"]


def test_explain_shows_everything_declared(acme):
    text = run("explain", "acme_gelu").output
    for part in ("acme-gelu 1.0", "torch.nn.GELU", "acme::gelu", "width at most 8", "fast"):
        assert part in text


def test_explain_json(acme):
    data = json.loads(run("explain", "acme_gelu", "--json").output)
    assert data["operators"][0]["name"] == "acme::gelu"


def test_explain_unknown_name_is_exit_1_with_suggestion(acme):
    result = run("explain", "acme_gelo")
    assert result.exit_code == 1
    assert "Did you mean 'acme_gelu'" in result.output


def test_doctor_reports_a_broken_plugin_with_its_traceback(broken):
    result = run("doctor")
    assert result.exit_code == 1
    assert "Traceback" in result.output
    assert "acme-bad 1.0 is broken" in result.output


def test_doctor_json_counts_problems(broken):
    data = json.loads(run("doctor", "--json").output)
    assert data["problems"] >= 1


def test_doctor_names_the_other_package_of_that_name(fake_distribution):
    fake_distribution("torchtitan-npu", version="0.2.2")
    result = run("doctor")
    assert result.exit_code == 1
    assert "pip uninstall torchtitan-npu" in result.output


ROTARY_PLUGIN = """
from torchtitan_npu_core import ConverterSpec, KnownIssue, OperatorSpec, hookimpl

@hookimpl
def torchtitan_npu_converters():
    return [ConverterSpec(
        name="acme_rope", summary="s", replaces=(), factory="acme_rope:None",
        operators=("npu::npu_rotary_mul",),
    )]

@hookimpl
def torchtitan_npu_operators():
    return [OperatorSpec(
        name="npu::npu_rotary_mul", kernels="acme_rope:None",
        schema="npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', "
        "Tensor? rotate=None) -> Tensor",
        known_issues=(KnownIssue(generations=("E",), text="it is loud"),),
    )]
"""


@pytest.mark.parametrize(
    ("version", "level", "says"),
    [
        ("2.9.0", "problem", "the schemas of torch_npu 2.9.0: npu::npu_rotary_mul: argument 5"),
        ("2.9.0.post2", "ok", "its 1 operators fit the schemas of torch_npu 2.9.0.post2"),
        ("2.13.0", "note", "npu::npu_rotary_mul: it is loud"),
        ("3.0", "note", "not known to this release"),
    ],
)
def test_doctor_compares_converters_with_the_installed_torch_npu(
    version, level, says, fake_distribution, monkeypatch
):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    fake_distribution("torch-npu", version=version)
    fake_distribution(
        "acme-rope",
        entry_points=ENTRY.format("rope", "acme_rope"),
        modules={"acme_rope": ROTARY_PLUGIN},
    )
    findings = json.loads(run("doctor", "--json").output)["rows"]
    ours = [f for f in findings if f["subject"] == "converter acme_rope"]
    assert (level, True) in [(f["level"], says in f["text"]) for f in ours]
    if level == "problem":
        assert "Releases that fit: 2.7.1.post4, " in ours[0]["text"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("return [3]", "it returned a int, expected OperatorSpec"),
        ("return 3", "TypeError"),
        ("return [OperatorSpec(name='a::f', schema='f(x)', kernels='m:K')]", "a::f: not a schema"),
        (
            "return [OperatorSpec(name='a::f', schema='f(Tensor x) -> Tensor', kernels='m:K', "
            "calls=('x', 'x, y'))]",
            "a::f: argument 2 is nothing, the call gives y",
        ),
    ],
)
def test_doctor_names_the_plugin_whose_operators_cannot_be_used(body, says, fake_distribution):
    head, _, _ = PLUGIN.partition("@hookimpl\ndef torchtitan_npu_operators")
    source = f"{head}@hookimpl\ndef torchtitan_npu_operators():\n    {body}\n"
    fake_distribution(
        "acme-gelu", entry_points=ENTRY.format("gelu", "acme_gelu"), modules={"acme_gelu": source}
    )
    result = run("doctor")
    assert result.exit_code == 1
    assert "Plugin acme-gelu 1.0: torchtitan_npu_operators cannot be used: " in result.output
    assert says in result.output


def test_doctor_mentions_a_plugin_found_twice(fake_distribution):
    for site in ("a", "b"):
        fake_distribution(
            "acme-gelu",
            site=site,
            entry_points=ENTRY.format("gelu", "acme_gelu"),
            modules={"acme_gelu": PLUGIN},
        )
    assert "found again at" in run("doctor").output


@pytest.mark.parametrize("args", [("nonsense",), ("list", "--nonsense"), ("explain",), ("plan",)])
def test_wrong_usage_is_exit_2(args):
    assert run(*args).exit_code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output


def test_help_works_after_a_command_was_loaded():
    run("list")
    assert run("--help").exit_code == 0


def test_converter_of_a_disabled_plugin_says_so(acme, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_NPU_DISABLE_PLUGINS", "gelu")
    result = run("explain", "acme_gelu")
    assert result.exit_code == 1
    assert "acme-gelu 1.0" in result.output
    assert "TORCHTITAN_NPU_DISABLE_PLUGINS" in result.output


def test_npu_section_that_nothing_reads_names_the_missing_key(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("[npu]\nallow_unmatched = []\n")
    result = run("train", str(path))
    assert result.exit_code == 1
    assert 'custom_config_module = "torchtitan_npu_core.titan_config"' in result.output


def test_name_of_a_shipped_config_wins_over_a_file_of_that_name(tmp_path, monkeypatch):
    from torchtitan_npu_core.configs import find_config

    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("#!/bin/sh\n")
    assert find_config("quickstart").suffix == ".toml"
    assert find_config("./quickstart").suffix == ""


def test_closing_lines_read_training_rows_among_validation_rows(tmp_path):
    from torchtitan_npu_core.cli.train import closing_lines

    key = "loss_metrics/global_avg_loss"
    rows = [{"step": 1, key: 8.0}, {"step": 2, key: 7.0}, {"step": 2, "validation_metrics/loss": 9}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = closing_lines(tmp_path, 0.0, "quickstart")
    assert "loss: 8.0000 -> 7.0000 from step 1 to step 2" in lines[1]
    assert lines[0] == "converted: nothing, the config names no converter of ours"


def test_missing_config_names_the_shipped_ones():
    result = run("train", "quickstrat")
    assert result.exit_code == 1
    assert "Did you mean 'quickstart'" in result.output


def test_unreadable_toml_is_one_readable_error(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("[model\n")
    result = run("train", str(path))
    assert result.exit_code == 1
    assert "cannot be read" in result.output


# ---------------------------------------------------------------- virtual-npu


@pytest.fixture
def npu_wheel(tmp_path, monkeypatch):
    """A torch and a torch_npu to be found, an empty cache, and a PATH that holds nothing."""
    for package in ("torch", "torch_npu"):
        (tmp_path / "site" / package / "lib").mkdir(parents=True)
        (tmp_path / "site" / package / "__init__.py").write_text("raise AssertionError\n")
    (tmp_path / "site" / "torch_npu" / "lib" / "libtorch_npu.so").write_text("x")
    (tmp_path / "bin").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TORCHTITAN_NPU_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write_program(folder, name, text):
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / "bin" / name).chmod(0o755)


@pytest.mark.parametrize(("present", "missing"), [((), "gcc"), (("gcc",), "nm")])
def test_virtual_npu_without_a_compiler_names_what_is_missing(npu_wheel, present, missing):
    for name in present:
        write_program(npu_wheel, name, "exit 0")
    result = run("virtual-npu", "--", "python")
    assert result.exit_code == 1
    assert f"torchtitan-npu: A virtual NPU needs {missing} to build" in result.output
    assert "apt-get install gcc binutils" in result.output
    # nothing half made is found by the next call
    assert not list((npu_wheel / "cache").iterdir())


def test_virtual_npu_shows_what_the_compiler_said(npu_wheel):
    write_program(npu_wheel, "nm", "exit 0")
    write_program(npu_wheel, "gcc", "echo no space left >&2; exit 3")
    result = run("virtual-npu", "--", "python")
    assert result.exit_code == 1
    assert "Building the virtual NPU failed" in result.output
    assert "ended with 3:\nno space left" in result.output
    assert not list((npu_wheel / "cache").iterdir())


def test_virtual_npu_without_torch_npu_says_how_to_get_it(monkeypatch):
    from torchtitan_npu_core.testing.virtual_npu import stubs

    monkeypatch.setattr(stubs.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(stubs, "installed_version", lambda name: "2.12.1+cpu")
    result = run("virtual-npu", "--", "python")
    assert result.exit_code == 1
    assert "torchtitan-npu: A virtual NPU runs the real torch_npu" in result.output
    assert "pip install --no-deps torch-npu==2.12.1\n" in result.output


def test_virtual_npu_that_cannot_write_its_cache_names_the_variable(npu_wheel, monkeypatch):
    (npu_wheel / "file").write_text("")
    monkeypatch.setenv("TORCHTITAN_NPU_CACHE", str(npu_wheel / "file"))
    result = run("virtual-npu", "--", "python")
    assert result.exit_code == 1
    assert "Set TORCHTITAN_NPU_CACHE" in result.output


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Stand-ins that are there already."""
    from torchtitan_npu_core.testing.virtual_npu import stubs

    monkeypatch.setattr(stubs, "build", lambda: tmp_path)
    return tmp_path


def test_virtual_npu_names_a_program_that_is_not_there(built):
    result = run("virtual-npu", "--", "no-such-program", "--flag")
    assert result.exit_code == 1
    assert result.output == "torchtitan-npu: no program 'no-such-program' on PATH\n"


def test_virtual_npu_json_is_the_environment(built, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setenv("TORCHTITAN_NPU_TARGET_DEVICE", "a3")
    found = json.loads(run("virtual-npu", "--device", "950", "--devices", "3", "--json").stdout)
    assert found["kind"] == "virtual-npu"
    assert found["set"]["LD_LIBRARY_PATH"] == f"{built / 'lib'}:/mine"
    assert found["set"]["TORCHTITAN_NPU_VIRTUAL_FAMILY"] == "950"
    assert found["set"]["TORCHTITAN_NPU_VIRTUAL_DEVICES"] == "3"
    # the device says what it is
    assert found["unset"] == ["TORCHTITAN_NPU_TARGET_DEVICE"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "virtual-npu -- python job.py"),
        (("--",), "virtual-npu -- python job.py"),
        (("--device", "a9", "--", "python"), "'a2', 'a3', '950'"),
        (("--devices", "0", "--", "python"), "1<=x<=64"),
        (("--devices", "65", "--", "python"), "1<=x<=64"),
        (("--devices", "two", "--", "python"), "'two'"),
    ],
)
def test_wrong_usage_of_virtual_npu_is_exit_2(args, words, monkeypatch):
    from torchtitan_npu_core.testing.virtual_npu import stubs

    monkeypatch.setattr(stubs, "build", lambda: pytest.fail("built for a wrong command line"))
    result = run("virtual-npu", *args)
    assert result.exit_code == 2
    assert words in result.output

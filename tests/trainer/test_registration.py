"""Names in torchtitan's registry, plain ``torchtitan.train`` included."""

import os
import subprocess
import sys

import pytest

from tests.trainer.harness import free_ports
from torchtitan_npu_core import assets

TOML = """
[job]
{job}
[experimental]
custom_import = "torchtitan_npu_core.titan"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{assets}"
converters = {converters}
[training]
dataset = "c4_test"
dataset_path = "{text}"
seq_len = 64
local_batch_size = 1
steps = 1
{more}
"""


@pytest.fixture
def write(tmp_path):
    def make(converters, job="", more=""):
        path = tmp_path / "job.toml"
        path.write_text(
            TOML.format(
                assets=assets.tokenizer_folder(),
                text=assets.text_folder(),
                converters=converters,
                job=job,
                more=more,
            )
        )
        return path

    return make


def run(*command, env=None):
    environment = {
        **os.environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)),
        **(env or {}),
    }
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def plain(path, **kwargs):
    """torchtitan's own entry point, nothing of ours but the custom import in the TOML."""
    return run(sys.executable, "-m", "torchtitan.train", "--job.config_file", str(path), **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("converters", "says"),
    [
        ('["npu_rms_nrom"]', "Did you mean 'npu_rms_norm'"),
        ('["npu_rope", "npu_rope"]', 'Use: converters = ["npu_rope"]'),
        ('"npu_rope"', "must be a list"),
        ('["npu_dsa"]', "pip install torchtitan-npu-op-dsa"),
    ],
)
def test_unknown_name_under_plain_torchtitan(write, converters, says):
    done = plain(write(converters))
    assert done.returncode != 0
    assert says in done.stderr
    assert "KeyError" not in done.stderr
    # before the model: torchtitan logs 'Building llama3 debugmodel' then
    assert "Building" not in done.stdout


@pytest.mark.slow
def test_broken_plugin_is_named_under_plain_torchtitan(write, tmp_path):
    from torchtitan_npu_core.testing import write_distribution

    write_distribution(
        tmp_path / "site",
        "acme-bad",
        entry_points="[torchtitan_npu.converters]\nbad = acme_bad\n",
        modules={"acme_bad": "import does_not_exist"},
    )
    done = plain(write('["bad_norm"]'), env={"PYTHONPATH": str(tmp_path / "site")})
    assert "acme-bad 1.0" in done.stderr
    assert "does_not_exist" in done.stderr


@pytest.mark.slow
def test_device_library_that_cannot_load_does_not_stop_a_run(write, tmp_path):
    from torchtitan_npu_core.testing import write_distribution

    # as torch_npu on a host without CANN: torch itself fails to import it
    write_distribution(
        tmp_path / "site",
        "torch-npu",
        version="2.13.0",
        entry_points="[torch.backends]\ntorch_npu = torch_npu:_autoload\n",
        modules={"torch_npu": "raise ImportError('libhccl.so: cannot open shared object file')"},
    )
    env = {"PYTHONPATH": str(tmp_path / "site")}
    assert run(sys.executable, "-c", "import torch", env=env).returncode != 0
    done = train(write('["npu_rope"]'), env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("libhccl.so") + done.stderr.count("libhccl.so") == 1
    command = [sys.executable, "-m", "torchtitan_npu_core"]
    assert run(*command, "plan", "llama3_debug", env=env).returncode == 0
    doctor = run(*command, "doctor", env=env)
    assert doctor.returncode == 1
    assert "libhccl.so" in doctor.stdout


IN_PROCESS = """
import sys
from torchtitan_npu_core import cpu_device
cpu_device.install()
from torchtitan.protocols import model_converter as host
from torchtitan.protocols.train_spec import _extra_train_specs
before, specs = set(host._registry_model_converter_cls), dict(_extra_train_specs)
{code}
"""


def python(code):
    done = run(sys.executable, "-c", IN_PROCESS.format(code=code))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_registers_our_names_and_nothing_else():
    python(
        "import torchtitan_npu_core.titan as titan\n"
        "assert set(host._registry_model_converter_cls) - before == {'npu_rms_norm', 'npu_rope'}\n"
        "assert dict(_extra_train_specs) == specs\n"
    )


def test_second_registration_is_harmless():
    python(
        "import torchtitan_npu_core.titan as titan\n"
        "table = dict(host._registry_model_converter_cls)\n"
        "titan.register()\n"
        "assert host._registry_model_converter_cls == table\n"
    )


def test_name_taken_by_another_package_is_a_clear_error():
    python(
        "class Theirs(host.ModelConverter): pass\n"
        "host.register_model_converter(Theirs, 'npu_rope')\n"
        "import torchtitan_npu_core.titan as titan\n"
        "try:\n"
        "    titan.register(['npu_rope'])\n"
        "except Exception as error:\n"
        "    assert type(error).__name__ == 'NameTakenError', error\n"
        "    assert 'npu_rope' in str(error) and 'Theirs' in str(error)\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )


def test_name_taken_but_not_requested_does_not_stop_a_run():
    python(
        "import logging; logging.basicConfig()\n"
        "class Theirs(host.ModelConverter): pass\n"
        "from torchtitan.config import JobConfig\n"
        "job_config = JobConfig()\n"
        "def trainer(job_config):\n"
        "    host.register_model_converter(Theirs, 'npu_rope')\n"
        "    import torchtitan_npu_core.titan\n"
        "job_config.model.converters = ['npu_rms_norm']\n"
        "trainer(job_config)\n"
        "assert host._registry_model_converter_cls['npu_rope'] is Theirs\n"
    )


SECTION = 'custom_config_module = "torchtitan_npu_core.titan_config"'


def train(path, *options, **kwargs):
    command = [
        sys.executable,
        "-m",
        "torchtitan_npu_core.worker",
        "--job.config_file",
        str(path),
        "--job.dump_folder",
        str(path.parent / "dump"),
        *options,
    ]
    return run(*command, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("[npu]\nalow_unmatched = []", "Did you mean 'allow_unmatched'"),
        ("[npu.npu_rope]\nfp23 = true", "Did you mean 'fp32'"),
        ('[npu.npu_rope]\nfp32 = "yes"', "must be of type bool"),
        ("[npu.npu_rpoe]\nfp32 = true", "Did you mean 'npu_rope'"),
    ],
)
def test_wrong_option_is_an_error_that_suggests_the_right_one(write, more, says):
    done = train(write('["npu_rope"]', SECTION, more))
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_options_reach_the_converter_and_unmatched_can_be_allowed(write):
    done = train(
        write(
            '["npu_rms_norm", "npu_rope"]',
            SECTION,
            '[npu]\nallow_unmatched = ["npu_rope"]\ntarget = "a3"\n[npu.npu_rope]\nfp32 = true',
        )
    )
    assert done.returncode == 0, done.stderr
    assert "npu_rope: replaced 6 of 6 Attention -> NPUAttention" in done.stdout
    assert "npu_rms_norm: replaced 13 of 13 RMSNorm -> NPURMSNorm" in done.stdout
    assert (write("[]").parent / "dump" / "conversion.json").is_file()


@pytest.mark.slow
def test_combined_config_module(write, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from torchtitan_npu_core.titan_config import with_npu_section\n"
        "@dataclass\nclass Mine:\n    depth: int = 3\n"
        "@dataclass\nclass JobConfig:\n    mine: Mine = field(default_factory=Mine)\n"
        "JobConfig = with_npu_section(JobConfig)\n"
    )
    path = write(
        '["npu_rope"]',
        'custom_config_module = "mine"',
        "[mine]\ndepth = 4\n[npu.npu_rope]\nfp32 = true",
    )
    done = train(path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ranks_with_different_plugins_are_told_what_differs(write, tmp_path):
    from torchtitan_npu_core.testing import write_distribution

    write_distribution(
        tmp_path / "site",
        "acme-extra",
        version="3.1",
        entry_points="[torchtitan_npu.converters]\nextra = acme_extra\n",
        modules={
            "acme_extra": "from torchtitan_npu_core import hookimpl\n"
            "@hookimpl\ndef torchtitan_npu_converters():\n    return []\n"
        },
    )
    command = [
        sys.executable,
        "-m",
        "torchtitan_npu_core.worker",
        "--job.config_file",
        str(write('["npu_rope"]')),
        "--job.dump_folder",
        str(tmp_path / "dump"),
    ]
    processes = []
    port = str(free_ports(1))
    for rank in range(2):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        if rank == 1:
            env["PYTHONPATH"] = str(tmp_path / "site")
        processes.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    outputs = [p.communicate(timeout=300) for p in processes]
    assert [p.returncode for p in processes] == [1, 1]
    for _, stderr in outputs:
        assert "extra (acme-extra 3.1) loaded: on ranks [1], not on ranks [0]" in stderr


def test_target_of_one_job_does_not_reach_the_next():
    python(
        "from types import SimpleNamespace as N\n"
        "from torchtitan.config import JobConfig\n"
        "from torchtitan_npu_core.limits import target_device\n"
        "from torchtitan_npu_core.titan.session import session_for\n"
        "first, second = JobConfig(), JobConfig()\n"
        "first.npu = {'target': 'a3'}\n"
        "session_for(first)\n"
        "assert target_device() == 'a3'\n"
        "session_for(second)\n"
        "assert target_device() == ''\n"
    )


def test_model_beyond_the_limits_of_the_target_is_refused_before_conversion():
    python(
        "from torchtitan.config import JobConfig\n"
        "from torchtitan_npu_core.errors import DeviceLimitError\n"
        "from torchtitan_npu_core.titan.job import build_meta_model, read_job\n"
        "from torchtitan_npu_core.titan.session import session_for\n"
        "job = read_job(['--model.name', 'llama3', '--model.flavor', 'debugmodel',\n"
        "    '--training.local_batch_size', '64', '--model.converters', 'npu_rope'])\n"
        "job.npu = {'target': 'a2'}\n"
        "model = build_meta_model(job)\n"
        "before = [type(m) for m in model.modules()]\n"
        "try:\n"
        "    session_for(job).convert('npu_rope', model)\n"
        "except DeviceLimitError as error:\n"
        "    assert 'interleave_rows is 1024' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
        "assert [type(m) for m in model.modules()] == before\n"
    )

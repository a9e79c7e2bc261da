"""Builds stand-ins for the CANN libraries that torch_npu links, once per torch_npu and source.

``runtime.c`` and ``hccl.c`` hold what does something; every other name the wheel links or looks up
gets a function that returns 0.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

from torchtitan_npu_core.assets import cache_folder, make_folder
from torchtitan_npu_core.compat import installed_version
from torchtitan_npu_core.errors import CommandError

LIBRARIES = (
    "libhccl.so",
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
"""Libraries of CANN that torch_npu names as needed."""

SOURCES = ("common.h", "runtime.c", "hccl.c", "aclop.c")
SHARED = "libtorchtitan_npu_virtual.so"
ENTRY_POINT = "torchtitan_npu_core.testing.virtual_npu.install:autoload"

# names of CANN's interfaces; aclnn* are operators, which torch_npu looks up when it runs one
_NAME = re.compile(r"(?:acl(?!nn)(?:rt|op|mdl|tdt|prof|sys)?[A-Z]|Hccl|rt[A-Z]|[Mm]sprof)\w+")
_CPP_NAME = re.compile(r"_ZN?K?(?:2ge|3atb)\w+")
_DEFINED = re.compile(r"^API [^(\n]*?(\w+)\(", re.MULTILINE)


def _package(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise CommandError(
            f"A virtual NPU runs the real {name}, which is not installed here. Install the wheel "
            f"that fits your torch, without its dependencies: pip install --no-deps torch-npu"
            f"=={_matching_version()}"
            if name == "torch_npu"
            else f"A virtual NPU needs {name}, which is not installed here."
        )
    return Path(next(iter(found.submodule_search_locations)))


def _matching_version() -> str:
    return (installed_version("torch") or "2.13.0").split("+")[0]


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise CommandError(
            f"A virtual NPU needs {name} to build stand-ins for the CANN libraries, and it is not "
            f"on PATH. On Debian or Ubuntu: apt-get install gcc binutils"
        )
    return path


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CommandError(
            f"Building the virtual NPU failed: {' '.join(command[:4])} ... ended with "
            f"{done.returncode}:\n{done.stderr.strip()[-2000:]}"
        )
    return done.stdout


def _symbols(libraries: list[Path], kind: str) -> set[str]:
    lines = _run(_tool("nm"), "-D", kind, *map(str, libraries)).splitlines()
    # "address kind name@version"; lines of other forms are file headings
    return {line.split()[-1].split("@")[0] for line in lines if len(line.split()) > 1}


def needed_names(torch_folder: Path, npu_folder: Path) -> set[str]:
    """Names of CANN functions that the wheel links or looks up at run time."""
    npu = sorted([*(npu_folder / "lib").glob("*.so"), *npu_folder.glob("*.so")])
    torch = sorted([*(torch_folder / "lib").glob("*.so*"), *torch_folder.glob("*.so")])
    linked = _symbols(npu, "--undefined-only") - _symbols(npu + torch, "--defined-only")
    names = {n for n in linked if _NAME.fullmatch(n) or _CPP_NAME.fullmatch(n)}
    for library in npu:
        # strings of the binary: names passed to dlsym stand there as words of their own
        text = library.read_bytes()
        names |= {
            w.decode()
            for w in re.findall(rb"(?<=\0)[A-Za-z]\w{3,80}(?=\0)", text)
            if _NAME.fullmatch(w.decode())
        }
    return names


def _write_metadata(folder: Path) -> None:
    """A distribution that torch finds on the path and asks to load a device backend."""
    metadata = folder / "site" / "torchtitan_npu_virtual-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchtitan-npu-virtual\nVersion: 0\n"
    )
    (metadata / "entry_points.txt").write_text(
        f"[torch.backends]\ntorchtitan_npu_virtual = {ENTRY_POINT}\n"
    )


def _build(folder: Path, sources: dict[str, str]) -> None:
    gcc = _tool("gcc")
    work, libraries = folder / "source", folder / "lib"
    work.mkdir()
    libraries.mkdir()
    for name, text in sources.items():
        (work / name).write_text(text)
    defined = set(_DEFINED.findall("".join(sources.values())))
    missing = needed_names(_package("torch"), _package("torch_npu")) - defined
    stubs = "\n".join(f"long {name}(void) {{ return 0; }}" for name in sorted(missing))
    (work / "stubs.c").write_text(stubs + "\n")
    shared = ("-shared", "-fPIC", "-O2", "-w")
    inputs = [str(work / name) for name in (*sources, "stubs.c") if name.endswith(".c")]
    # one library holds everything, so that its state exists once; the names lead to it
    _run(gcc, *shared, *inputs, f"-Wl,-soname,{SHARED}", "-lpthread", "-o", str(libraries / SHARED))
    for name in LIBRARIES:
        _run(
            gcc, *shared, "-Wl,--no-as-needed", str(libraries / SHARED), f"-Wl,-soname,{name}",
            "-Wl,-rpath,$ORIGIN", "-o", str(libraries / name),
        )  # fmt: skip
    _write_metadata(folder)


def build() -> Path:
    """Build the libraries if they do not exist yet.

    Returns:
        A folder with ``lib`` for ``LD_LIBRARY_PATH`` and ``site`` for ``PYTHONPATH``.

    Raises:
        CommandError: If torch_npu, gcc or nm is missing, or the build fails.
    """
    npu_library = _package("torch_npu") / "lib" / "libtorch_npu.so"
    source_folder = files("torchtitan_npu_core.testing.virtual_npu")
    sources = {name: (source_folder / name).read_text() for name in SOURCES}
    key = hashlib.sha256(Path(__file__).read_bytes() + "".join(sources.values()).encode())
    # the wheel's library, told apart by version and size: hashing 100 MB takes longer than building
    key.update(f"{installed_version('torch_npu')} {npu_library.stat().st_size}".encode())
    key.update((installed_version("torch") or "").encode())
    folder = cache_folder() / f"virtual-npu-{key.hexdigest()[:16]}"
    return make_folder(folder, lambda target: _build(target, sources))

"""Write the operator schemas of torch_npu releases into core, read from their wheels.

    python tools/read_schemas.py [--wheels FOLDER] [VERSION ...]

Needs pip, packaging and the package index; torch_npu is not imported and torch is not needed.
Without versions, every release since 2.7 is read. Releases with equal schemas are one generation.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.version import Version

from torchtitan_npu_core.schemas import parse_schema

FOLDER = Path(__file__).parents[1] / "packages/core/src/torchtitan_npu_core/schemas"
OLDEST = Version("2.7")
# any run of text that long in the library; the ones with the shape of a schema are kept
TEXT = re.compile(rb"[\x20-\x7e]{10,}")
SCHEMA = re.compile(r"[A-Za-z_][\w.]*\(.*\) -> .+")


def released() -> list[str]:
    """Versions on the package index, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch_npu"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    listed = re.search(r"Available versions: (.*)", text)
    if listed is None:
        raise SystemExit(f"pip lists no versions of torch_npu:\n{text}")
    versions = listed.group(1).split(", ")
    return sorted((v for v in versions if Version(v) >= OLDEST), key=Version)


def download(version: str, folder: Path) -> Path:
    """The wheel of one release, without what it depends on."""
    pattern = f"torch_npu-{version}-cp311-*.whl"
    if not list(folder.glob(pattern)):
        where = ["--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]
        what = ["--no-deps", "--only-binary", ":all:", f"torch_npu=={version}"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--dest", str(folder)]
        subprocess.run([*command, *where, *what], check=True)
    return next(folder.glob(pattern))


def schemas_in(wheel: Path) -> frozenset[str]:
    """Schemas of the ``npu`` namespace that a wheel's library defines."""
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read("torch_npu/lib/libtorch_npu.so")
    texts = {found.group().decode() for found in TEXT.finditer(data)}
    # process groups are torch_npu's own plumbing; named tensors come and go with torch's version
    return frozenset(
        t for t in texts if SCHEMA.fullmatch(t) and "__torch__" not in t and "Dimname" not in t
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--wheels", type=Path, help="keep downloaded wheels here")
    arguments = parser.parse_args()
    generations: dict[frozenset[str], list[str]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        for version in arguments.versions or released():
            schemas = schemas_in(download(version, arguments.wheels or Path(scratch)))
            for schema in schemas:
                parse_schema(schema)
            generations[schemas].append(version)
    # the oldest release of each decides the order
    ordered = sorted(generations.items(), key=lambda item: Version(item[1][0]))
    ordered.sort(key=lambda item: len(item[0]))
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for letter, (schemas, versions) in zip("ABCDEFGHIJ", ordered, strict=False):
        data = {"generation": letter, "versions": versions, "schemas": sorted(schemas)}
        (FOLDER / f"{letter}.json").write_text(json.dumps(data, indent=1) + "\n")
        sys.stdout.write(f"{letter}: {len(schemas)} operators, {', '.join(versions)}\n")


if __name__ == "__main__":
    main()

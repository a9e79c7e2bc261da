"""Write the table of converters and torch_npu releases into docs/compatibility.md.

    python tools/compatibility_table.py [--check]

Needs core and the op packages installed, not torch. With --check nothing is written, and the exit
status is 1 if the page is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchtitan_npu_core.errors import OFFICIAL_CONVERTERS
from torchtitan_npu_core.loading import discover_and_load
from torchtitan_npu_core.schemas import Generation, calls_misfit, generations
from torchtitan_npu_core.specs import ConverterSpec, OperatorSpec

PAGE = Path(__file__).parents[1] / "docs/compatibility.md"
BEGIN = "<!-- written by tools/compatibility_table.py -->"
END = "<!-- end -->"


def table() -> str:
    """The table as Markdown."""
    plugins = discover_and_load()
    operators = {
        spec.name: spec
        for record in plugins.loaded
        for returned in plugins.call(record, "torchtitan_npu_operators")
        for spec in returned
    }
    converters = sorted(
        (
            c
            for record in plugins.loaded
            for c in record.converters
            if c.name in OFFICIAL_CONVERTERS
        ),
        key=lambda converter: converter.name,
    )
    head = ["generation", "torch-npu releases", *(f"`{c.name}`" for c in converters)]
    rows = [head, ["---"] * len(head)]
    notes: list[str] = []
    for generation in generations():
        row = [generation.name, ", ".join(generation.versions)]
        row += [answer(c, operators, generation, notes) for c in converters]
        rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", *(f"{i}. {note}" for i, note in enumerate(notes, 1))] if notes else []
    return "\n".join(lines)


def answer(
    converter: ConverterSpec,
    operators: dict[str, OperatorSpec],
    generation: Generation,
    notes: list[str],
) -> str:
    """One cell; what needs more words becomes a note."""
    called = [operators[name] for name in converter.operators if name.startswith("npu::")]
    found, usable = [], True
    for spec in called:
        base = spec.name.partition("::")[2]
        problem = calls_misfit(spec, generation.schemas.get(base))
        if problem:
            usable = False
            found.append(f"`{base}`: {problem}")
        issues = [i.text for i in spec.known_issues if generation.name in i.generations]
        found += [f"`{base}`: {text}" for text in issues]
    for text in found:
        if text not in notes:
            notes.append(text)
    marks = ", ".join(str(notes.index(text) + 1) for text in found)
    return ("yes" if usable else "no") + (f" ({marks})" if marks else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if arguments.check:
        if wanted != page:
            sys.exit(f"{PAGE.name} is out of date: run python {Path(__file__).name}")
        return
    PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()

"""A test suite from cases: every check for every label, and every mutation."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchtitan_npu_core import operators
from torchtitan_npu_core.testing.case_checks import (
    check_fake,
    check_formula,
    check_gradient_formula,
    check_gradients,
    check_opcheck,
    check_precision,
)
from torchtitan_npu_core.testing.checks import PromiseError
from torchtitan_npu_core.testing.operator_cases import Mutation, OperatorCase

CHECKS: dict[str, Callable[[OperatorCase, str], None]] = {
    "formula": check_formula,
    "gradients": check_gradients,
    "gradient-formula": check_gradient_formula,
    "precision": check_precision,
    "fake": check_fake,
    "opcheck": check_opcheck,
}
"""Checks by the name they have in test ids and in ``Mutation.caught_by``."""


def check_mutation(case: OperatorCase, mutation: Mutation) -> None:
    """The check a mutation names fails on a copy of the operator that has the mutation.

    Raises:
        PromiseError: If that check passes for every label.
    """
    mutant = _mutant(case, mutation)
    for label in case.inputs:
        try:
            CHECKS[mutation.caught_by](mutant, label)
        except PromiseError:
            return
    promise = f"{case.operator}: check {mutation.caught_by!r} notices {mutation.name!r}"
    raise PromiseError(promise, f"it passes for {', '.join(case.inputs)}")


_numbers = itertools.count()


def _mutant(case: OperatorCase, mutation: Mutation) -> OperatorCase:
    known = case.registered()
    # an operator of its own, with the same schema: the right one stays as it is
    spec = replace(known.spec, name=f"torchtitan_npu_mutant_{next(_numbers)}::{case.base}")
    kernels = replace(known.kernels, **mutation.kernels)
    operators._define(spec, kernels)
    return replace(case, operator=spec.name, kernels=kernels)


def operator_checks(
    cases: Sequence[OperatorCase], checks: Mapping[str, Callable[..., None]] = CHECKS
) -> list[Any]:
    """Parameters for a test that calls them, e.g. with id ``npu_rms_norm-formula-split-view``.

    Args:
        cases: What to check.
        checks: Checks by name. One that takes a label runs for every label of a case. With the
            default, every mutation is tried too.
    """
    import pytest

    found = []
    for case in cases:
        for name, check in checks.items():
            if check is check_gradient_formula and case.gradients is None:
                continue
            if len(inspect.signature(check).parameters) == 1:
                found.append(pytest.param(functools.partial(check, case), id=f"{case.base}-{name}"))
                continue
            for label in case.inputs:
                bound = functools.partial(check, case, label)
                found.append(pytest.param(bound, id=f"{case.base}-{name}-{label}"))
        for mutation in case.mutations if checks is CHECKS else ():
            bound = functools.partial(check_mutation, case, mutation)
            found.append(pytest.param(bound, id=f"{case.base}-mutation-{mutation.name}"))
    return found

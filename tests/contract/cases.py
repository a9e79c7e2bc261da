"""Cases of every operator package: the list to add a package to."""

from tests.op_norm_rope import cases as norm_rope

CASES = (*norm_rope.CASES,)

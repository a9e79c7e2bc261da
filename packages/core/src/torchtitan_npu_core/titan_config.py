"""Optional config module for torchtitan: adds the ``[npu]`` section.

    [job]
    custom_config_module = "torchtitan_npu_core.titan_config"

    [npu]
    allow_unmatched = ["npu_gmm"]
    [npu.npu_rope]
    fp32 = true

torchtitan takes one such module. A job that needs another one as well combines them in a module of
its own: ``JobConfig = with_npu_section(OtherJobConfig)``.
"""

# no `from __future__ import annotations` here: torchtitan merges sections by their field types,
# which would be strings

from dataclasses import field, make_dataclass
from typing import Annotated, Any

import tyro

# Suppressed on the command line: keys are checked by us, with suggestions, not by the host
Section = Annotated[dict[str, Any], tyro.conf.Suppress]


def with_npu_section(config_class: type | None = None) -> type:
    """Return a config class that has the ``[npu]`` section.

    Args:
        config_class: Another custom config class to extend, or None.
    """
    bases = () if config_class is None else (config_class,)
    return make_dataclass("JobConfig", [("npu", Section, field(default_factory=dict))], bases=bases)


JobConfig = with_npu_section()

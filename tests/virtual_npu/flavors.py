"""For ``experimental.custom_import``: our converters, and debug flavors the host can shard.

Qwen3's debug flavor ties its embedding to its output, which torchtitan 0.2.2 can neither shard with
FSDP nor with tensor parallelism on any device.
"""

import copy

from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu_core.titan  # noqa: F401

for _name in ("llama3", "qwen3", "deepseek_v3"):
    _flavors = get_train_spec(_name).model_args
    _flavors["debugmodel_untied"] = copy.deepcopy(_flavors["debugmodel"])
    if hasattr(_flavors["debugmodel_untied"], "enable_weight_tying"):
        _flavors["debugmodel_untied"].enable_weight_tying = False

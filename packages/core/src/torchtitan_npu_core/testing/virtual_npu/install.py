"""Makes this process's torch_npu compute. Loaded by torch itself, see ``stubs``."""

from __future__ import annotations

import torch

_libraries: list[torch.library.Library] = []


def autoload() -> None:
    """Register the kernels, once, after torch_npu has been loaded."""
    if _libraries:
        return
    import warnings

    import torch_npu  # noqa: F401

    from torchtitan_npu_core.testing.virtual_npu import aten, npu_ops

    device = torch.library.Library("aten", "IMPL", "PrivateUse1")
    autograd = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    npu = torch.library.Library("npu", "IMPL", "PrivateUse1")
    _libraries.extend((device, autograd, npu))
    with warnings.catch_warnings():
        # replacing torch_npu's kernels is what this is for
        warnings.simplefilter("ignore", UserWarning)
        aten.install(device, autograd)
        npu_ops.install(npu)

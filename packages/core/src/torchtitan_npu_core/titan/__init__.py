"""torchtitan 0.2.2 as a host: importing this registers our converter names with its trainer.

[experimental]
custom_import = "torchtitan_npu_core.titan"
"""

from torchtitan_npu_core.titan.registration import check_names, register, register_for_importer
from torchtitan_npu_core.titan.session import installed, session_for

__all__ = ["check_names", "installed", "register", "session_for"]

register_for_importer()

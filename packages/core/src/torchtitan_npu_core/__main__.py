"""``python -m torchtitan_npu_core`` is ``torchtitan-npu``."""

from torchtitan_npu_core.cli import main

if __name__ == "__main__":
    main(prog_name="torchtitan-npu")

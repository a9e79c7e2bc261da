"""Jobs of torchtitan's trainer, one after the other in the processes of one torchrun.

    torchrun --nproc-per-node N -m tests.virtual_npu.jobs JOBS.json

For each, every rank runs the module ``torchtitan.train`` as ``__main__`` with the job's options as
its command line: what ``torchrun -m torchtitan.train OPTIONS`` does, without importing everything
again. What a rank prints for a job goes to ``LOG.<rank>``.
"""

import contextlib
import gc
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from unittest import mock


def main(jobs_file):
    plan = json.loads(Path(jobs_file).read_text())
    rank, pause = os.environ["RANK"], time.sleep
    # torchrun's store keeps what an earlier process group left in it
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port, (log, options) in enumerate(plan["jobs"], plan["port"]):
        os.environ["MASTER_PORT"] = str(port)
        with (
            open(f"{log}.{rank}", "w") as file,
            contextlib.redirect_stdout(file),
            mock.patch.object(sys, "argv", ["train.py", *options]),
            # the host waits two seconds at the end of every run for ranks that are late
            mock.patch("time.sleep", lambda seconds: pause(min(seconds, 0.2))),
        ):
            try:
                runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
            except BaseException:
                traceback.print_exc(file=file)
                raise
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1])

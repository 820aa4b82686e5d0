"""A worker that stands still for a while as it loads, as all of its machine's processes may.

python -m support.frozen_worker FD
"""

import os
import signal
import subprocess
from typing import Any

from headrace.cluster.worker import main
from headrace.live.boot import Booted, boot

FROZEN_S = 3.0


def freezing_boot(*args: Any, on_progress: Any, **settings: Any) -> Booted:
    on_progress("load", 1, 4)
    waker = f"sleep {FROZEN_S}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", waker])
    os.kill(os.getpid(), signal.SIGSTOP)
    return boot(*args, on_progress=on_progress, **settings)


if __name__ == "__main__":
    main(freezing_boot)

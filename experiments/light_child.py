"""A worker for `experiments.kill_sweep` that takes the place of a compile.

It starts a process that would outlive it, and sleeps for a moment. Then it writes a record, fails or crashes. The batch
decides which of these it does.
"""

import os
import signal
import sys
import time
from pathlib import Path

from jaxremat.trial.record import TrialRecord
from jaxremat.trial.task import Result, read_task, write_result


def main(task: Path, result: Path) -> None:
    """Reads the task and writes the result. Batch 4 crashes, batch 5 runs out of memory, other batches have a record."""
    flags = read_task(task).flags
    batch, policy = flags["batch"][0], flags["policy"][0]
    os.posix_spawnp("sleep", ["sleep", "1000"], os.environ)
    time.sleep(0.02 * (batch % 3))
    if batch == 4:
        os.kill(os.getpid(), signal.SIGSEGV)
    total = batch * len(policy) * 2**30
    record = TrialRecord(
        record="trial",
        model=flags["model"],
        num_params=1,
        requested_policy=policy,
        policy=policy,
        target=flags["target"],
        batch=batch,
        global_batch=batch,
        seq_len=1,
        loss="full",
        optimizer="adamw",
        attention="xla",
        argument_bytes=0,
        temp_bytes=total,
        total_bytes=total,
        budget_bytes=20 * 2**30,
        fits=total <= 20 * 2**30,
        num_compiles=1,
        config={},
        xla_flags=None,
        versions={},
    )
    failed = Result(outcome="oom", error="RESOURCE_EXHAUSTED")
    write_result(result, failed if batch == 5 else Result(outcome="ok", records=(record,)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""The command itself, which also says the last loss of each measured step: `python -m tests.losses --model tiny ...`.

Records don't hold losses. Each process of several prints its own to stderr, as a line of JSON.
"""

import json
import sys

from jaxremat.cli.run import main
from jaxremat.trial import trials


def measure(self: trials.Trials, batch: int, compilation: trials.Compilation) -> trials.StepTiming:
    (policy,) = (steps.policy for steps in self.steps.values() if steps.done.get(batch) is compilation)
    timing = really_measure(self, batch, compilation)
    print(json.dumps({"policy": str(policy), "loss": timing.last_loss}), file=sys.stderr, flush=True)
    return timing


really_measure = trials.Trials.measure

if __name__ == "__main__":
    trials.Trials.measure = measure
    sys.exit(main())

"""The command itself, which also says the last loss of each measured step: `python -m tests.losses --model tiny ...`.

Records don't hold losses. Each process of several prints its own to stderr, as a line of JSON.
"""

import json
import sys

from jaxremat.cli.run import main
from jaxremat.trial import trial


def measure(self: trial.PolicyTrials, batch: int, compilation: trial.Compilation) -> trial.StepTiming:
    timing = really_measure(self, batch, compilation)
    print(json.dumps({"policy": str(self.policy), "loss": timing.last_loss}), file=sys.stderr, flush=True)
    return timing


really_measure = trial.PolicyTrials.measure

if __name__ == "__main__":
    trial.PolicyTrials.measure = measure
    sys.exit(main())

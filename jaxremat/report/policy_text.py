"""A policy's text in tables and sentences: short, and with the preset of XLA's options that it was compiled with."""

import re

from jaxremat.trial.record import LargestBatchRecord, StepRecord
from jaxremat.xla.options import with_preset

#: The most names of a policy that a table shows.
SHOWN_NAMES = 5


def policy_text(row: StepRecord | LargestBatchRecord) -> str:
    """The shortened policy of a record, with the preset if it isn't the default: `save:div,sub with latency-hiding`."""
    return with_preset(shortened(row.policy), row.xla_preset)


def shortened(policy: str) -> str:
    """A policy's text with at most `SHOWN_NAMES` names of each list: `save:div,sub,mul and 18 more`.

    The whole text is among the sentences of a plan and in the records.
    """

    def one(match: re.Match[str]) -> str:
        names = match[2].split(",")
        more = len(names) - SHOWN_NAMES
        return match[0] if more <= 1 else f"{match[1]}:{','.join(names[:SHOWN_NAMES])} and {more} more"

    return re.sub(r"(save|offload):([^+|]+)", one, policy)

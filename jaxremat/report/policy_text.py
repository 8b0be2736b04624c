"""A policy in tables and sentences: as it was typed.

What that stands for is said whole once, in a line to copy.

A row has `minimal (save 9 values)`, and a line below the table has `save:query_proj,key_proj,...` in full. A short text is in the
row itself: `full (nothing)`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from jaxremat.trial.record import StepRecord
from jaxremat.xla.options import with_preset

#: The most names of each list that a row shows.
SHOWN_NAMES = 5
#: A text of at most so many characters is short.
_SHORT = 24
#: A list of names in a policy.
_NAMES = re.compile(r"(save|offload):([^+|]+)")


def policy_text(row: Any) -> str:
    """The policy of a record as it was typed.

    The preset follows if it isn't the default: `dots with latency-hiding`.
    """
    return with_preset(as_typed(row.requested_policy, row.policy), getattr(row, "xla_preset", "default"))


def as_typed(typed: str, policy: str) -> str:
    """The typed policy, and in a few words the one that it stands for.

    Where that is another policy, it follows: `minimal (save 9 values)`.
    """
    return shortened(typed) if typed == policy else f"{shortened(typed)} ({_brief(policy)})"


def _brief(policy: str) -> str:
    """A policy in a few words.

    Of a long one, lists of more than two names are counted: `save 17 values +attention`.
    """
    if len(policy) <= _SHORT:
        return policy

    def brief_list(match: re.Match[str]) -> str:
        names = match[2].split(",")
        return match[0] if len(names) <= 2 else f"{match[1]} {len(names)} values"

    return _NAMES.sub(brief_list, policy).replace("values+", "values +")


def _batch_and_length(row: StepRecord) -> str:
    return f"batch {row.batch}" if row.seq_len is None else f"batch {row.batch} of {row.seq_len:,} tokens"


def policies_in_full(rows: Iterable[Any], place: Callable[[Any], str] = _batch_and_length) -> list[str]:
    """A line for each policy whose whole text isn't in `policy_text`.

    The lines are to be printed without line breaks. Where one text stands for several policies, they have the places of the
    rows too: `auto, batch 8: save:...`.
    """
    places: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.policy not in (text := policy_text(row)):
            places[text][row.policy].append(place(row))
    return [
        f"{', '.join(dict.fromkeys([text, *(where if len(policies) > 1 else [])]))}: {policy}"
        for text, policies in places.items()
        for policy, where in policies.items()
    ]


def shortened(policy: str) -> str:
    """A policy's text with at most `SHOWN_NAMES` names of each list.

    For example `save:div,sub,mul and 18 more`.
    """

    def short_list(match: re.Match[str]) -> str:
        names = match[2].split(",")
        more = len(names) - SHOWN_NAMES
        return match[0] if more <= 1 else f"{match[1]}:{','.join(names[:SHOWN_NAMES])} and {more} more"

    return _NAMES.sub(short_list, policy)

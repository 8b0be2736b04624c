"""The numbers in a plan's sentences, from records that no planner made."""

import re

import pytest

from jaxremat.report.plan import plan_sentences
from jaxremat.trial.record import PlanRecord


def plan(recompute_s: float | None, bound_s: float, step_s: float = 0.25) -> PlanRecord:
    return PlanRecord(
        **dict(model="m", num_params=1, target="t", seq_len=None, objective="time", policy="dots", loss="own", batch=8),
        **dict(budget_bytes=2**31, total_bytes=2**30, predicted_total_bytes=None if recompute_s is None else 2**30),
        **dict(step_s=step_s, recompute_s=recompute_s, bound_s=bound_s, layers=("dots",), prices=(), more=(), tried=()),
        **dict(num_compiles=1, config={}, versions={}),
    )


@pytest.mark.parametrize(
    ("recompute_s", "bound_s", "numbers"),
    [
        (0.01448, 0.01409, ["14.48 ms", "250.0 ms", "14.09 ms", "0.16%"]),
        (3.0852e-5, 3.0048e-5, ["0.0309 ms", "250.0 ms", "0.0300 ms"]),
        (4e-9, 0.0, ["less than 0.001 ms", "250.0 ms", "less than 0.001 ms"]),
        (None, 2.5e-4, ["0.250 ms"]),
    ],
)
def test_seconds_have_digits_that_mean_something(recompute_s, bound_s, numbers):
    *_, said = plan_sentences(plan(recompute_s, bound_s))
    assert re.findall(r"(?:less than )?[\d.]+(?: ms|%)", said) == numbers

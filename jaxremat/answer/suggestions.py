"""Suggests changes under which a step fits that doesn't fit as it is.

Changes are tried from the one that costs the least. Each is compiled, and each comes as flags to paste: for a step that doesn't
fit with `--policy none`, the suggestions may be `--loss chunked`, `--policy dots+attention` and `--batch 4 --accumulate 2`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxremat.chips.installed import versions
from jaxremat.config import divisors
from jaxremat.errors import CompileError
from jaxremat.policy.spec import NOTHING, Every, Policy, Rule
from jaxremat.search.batch import ended, search_from_above, search_upwards
from jaxremat.trial.record import SuggestionRecord, TrialRecord, picked
from jaxremat.trial.trials import Trials

#: The policies to try, from the one that saves the most to the one that saves the least.
_THRIFTIER: tuple[Policy, ...] = (Rule("none"), Rule("dots", True), NOTHING, Every("sqrt", NOTHING))
#: The optimizers to try, from the one that changes the training the least to the one that changes it the most.
_OPTIMIZERS = ("adamw", "adamw-bf16", "lion", "adafactor")


@dataclass(frozen=True)
class _Step:
    """A step to try.

    Attributes:
        flags: what differs from the step that doesn't fit, as flags of the command.
        policy: its policy.
        batch: its batch.
        trials: its trials.
    """

    flags: str
    policy: Policy
    batch: int
    trials: Trials


def cheapest_suggestions(
    trials: Trials,
    policy: Policy,
    batch: int,
    *,
    max_suggestions: int = 3,
    on_compile: Callable[[str, int], None] = lambda flags, number: None,
) -> tuple[list[SuggestionRecord], SuggestionRecord | None]:
    """Compiled steps that fit in place of one that doesn't.

    The kinds of changes are tried in this order, until there are enough suggestions. Each kind gives at most one.

    1. The loss in chunks.
    2. A policy that saves less.
    3. If neither of these is enough, both together.
    4. Microbatches, which take one more buffer of gradients.
    5. A smaller batch.
    6. Optimizers with less state, which change the training.

    If the training state alone is over the budget, only optimizers can help, and nothing else is tried. What a workload
    doesn't have is left out: losses, policies if it has no layers, batches if it has only one, and everything around the
    gradient if it is a whole step.

    Args:
        trials: the trials with their budget. A global batch stays as it is, and only its microbatches get smaller.
        policy: the policy under which `batch` doesn't fit.
        batch: sequences in the step that doesn't fit.
        max_suggestions: after so many suggestions nothing more is compiled.
        on_compile: called before each compile with the flags and the number of the compile, counted from 1.

    Returns:
        Up to `max_suggestions` suggestions, from the most samples per second, and the step of the fewest bytes among all compiled
        ones. The latter is None if nothing could be compiled.
    """
    is_global = trials.global_batch is not None
    trials = dataclasses.replace(trials, train=trials.train_at(batch), global_batch=None)
    rows: dict[str, TrialRecord] = {}

    def compiled(step: _Step) -> TrialRecord:
        if step.flags not in rows:
            on_compile(step.flags, len(rows) + 1)
            rows[step.flags] = step.trials.record(step.policy, step.batch, "probe")
        return rows[step.flags]

    fitting = (step.flags for step in _steps_that_fit(trials, policy, batch, compiled, is_global) if compiled(step).fits)
    found = [_suggestion(flags, rows[flags], len(rows)) for flags in itertools.islice(fitting, max_suggestions)]
    tried = [_suggestion(flags, row, len(rows)) for flags, row in rows.items() if row.total_bytes is not None]
    least = min(tried, key=lambda suggestion: suggestion.total_bytes, default=None)
    return sorted(found, key=lambda suggestion: -(suggestion.samples_per_s or 0.0)), least


def _steps_that_fit(
    trials: Trials, policy: Policy, batch: int, compiled: Callable[[_Step], TrialRecord], is_global: bool
) -> Iterator[_Step]:
    """The first step that fits of each kind of change, from the kind that costs the least."""
    is_step = trials.workload_at(batch).step is not None
    state = trials.state_bytes()
    if state <= trials.budget_bytes:
        chunked = trials.with_loss("chunked")
        chunks = [chunked] if trials.factory.facts(trials.train).loss == "full" else []
        num_layers = 0 if is_step else trials.factory.num_layers()
        thriftier = [other for other in _thriftier(policy) if num_layers > 1 or (num_layers and not other.recomputes_groups)]
        kinds = [[_Step("--loss chunked", policy, batch, other) for other in chunks]]
        kinds.append([_Step(f"--policy {other}", other, batch, trials) for other in thriftier])
        for kind in kinds:
            yield from _first_that_fits(kind, compiled)
        if chunks and not any(compiled(step).fits for kind in kinds for step in kind):
            both = [_Step(f"--policy {other} --loss chunked", other, batch, chunked) for other in thriftier]
            yield from _first_that_fits(both, compiled)
        if trials.factory.has_free_batch:
            yield from _smaller(trials, policy, batch, compiled, is_global=is_global, is_step=is_step)
    for name in () if is_step else _OPTIMIZERS:
        changed = trials.with_optimizer(name)
        if changed.state_bytes() < min(state, trials.budget_bytes):
            yield _Step(f"--optimizer {name}", policy, batch, changed)


def _first_that_fits(steps: list[_Step], compiled: Callable[[_Step], TrialRecord]) -> Iterator[_Step]:
    yield from itertools.islice((step for step in steps if compiled(step).fits), 1)


def _thriftier(policy: Policy) -> tuple[Policy, ...]:
    known = _THRIFTIER.index(policy) + 1 if policy in _THRIFTIER else _THRIFTIER.index(NOTHING)
    return _THRIFTIER[known:]


def _smaller(
    trials: Trials, policy: Policy, batch: int, compiled: Callable[[_Step], TrialRecord], *, is_global: bool, is_step: bool
) -> Iterator[_Step]:
    """The step of the largest microbatch that fits, and the step of the largest batch that fits.

    A global batch gives only the first: its microbatches are what `--batch` sets. A whole step gives only the second.
    """

    def accumulated(microbatch: int) -> _Step:
        accumulate = trials.train.accumulate * batch // microbatch
        flags = f"--batch {microbatch}" if is_global else f"--batch {microbatch} --accumulate {accumulate}"
        several = dataclasses.replace(trials, train=dataclasses.replace(trials.train, accumulate=accumulate))
        return _Step(flags, policy, microbatch, several)

    def smaller(size: int) -> _Step:
        return _Step(f"--batch {size}", policy, size, trials)

    unit = trials.factory.batch_unit
    microbatches = [] if is_step else [size for size in divisors(batch)[:-1] if size % unit == 0]
    for step, batches in ((accumulated, microbatches), (smaller, [] if is_global else range(unit, batch, unit))):
        if not batches:
            continue
        search = search_upwards
        if trials.speaks_early:  # there a batch that fits compiles for minutes
            search = functools.partial(search_from_above, early_bytes=functools.partial(_early_bytes, step))
        try:
            found = ended(search(lambda size, step=step: _total(compiled(step(size))), trials.budget_bytes, batches=batches))
        except CompileError:  # XLA rejected one of the batches; the other kinds of changes may still help
            continue
        if found.largest:
            yield step(found.largest)


def _early_bytes(step: Callable[[int], _Step], batch: int) -> int:
    tried = step(batch)
    return tried.trials.early_bytes(tried.policy, batch)


def _total(row: TrialRecord) -> int:
    if row.total_bytes is None:
        raise CompileError(row.error or "the step can't be compiled")
    return row.total_bytes


def _suggestion(flags: str, row: TrialRecord, num_compiles: int) -> SuggestionRecord:
    assert row.total_bytes is not None
    names = "model target policy loss optimizer batch accumulate total_bytes budget_bytes step_s step_source tokens_per_s"
    taken = picked(row, f"{names} samples_per_s")
    return SuggestionRecord(**taken, flags=flags, num_compiles=num_compiles, versions=versions())

"""The search for the largest batch claims only a pair that it tried: one batch that fits, and the next one that doesn't.

The search sees nothing of XLA but `total_bytes(batch)`. So functions stand in for XLA here, of every form that a compiler's
could have: affine, with a knee, constant, with bumps. The terms of the memory budget are at the end.
"""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxremat.config import divisors
from jaxremat.search.batch import FIRST_BATCH, GROWTH, MAX_BATCH, BatchSearch, largest_batch, search_upwards, spaced
from jaxremat.search.budget import make_budget
from tests.helpers import searched

GIB = 2**30


def search(total_bytes, budget, **options) -> BatchSearch:
    """`largest_batch`, with the claims that hold for every function whatsoever checked on the way."""
    return estimated(total_bytes, budget, **options)[0]


def estimated(total_bytes, budget, **options) -> tuple[BatchSearch, list[int]]:
    """The same with the estimates before each compile but the first."""
    calls, most, begun = [], [], []

    def counted(batch: int) -> int:
        calls.append(batch)
        return total_bytes(batch)

    def expect(further: int) -> None:
        most.append(len(calls) + further)

    found, (first, *said) = searched(search_upwards(counted, budget, expect=expect, begin=begun.append, **options))
    assert first is None
    assert {*calls} <= {*begun}, "each was begun"
    assert all(len(calls) <= at_most for at_most in most)
    assert most == sorted(most, reverse=True)
    batches = options.get("batches", range(1, MAX_BATCH + 1))
    assert len(calls) == len(set(calls)), f"compiled twice: {calls}"
    assert all(batch in batches for batch in calls)
    assert found.tried == tuple((batch, total_bytes(batch)) for batch in calls)
    tried = dict(found.tried)
    if found.largest == 0:
        assert found.largest_bytes is None
        assert tried[batches[0]] > budget, "0 is claimed only where the smallest batch was tried"
    else:
        assert found.largest_bytes == tried[found.largest] <= budget
    if found.next is None:
        assert found.largest == batches[-1], "only the end of the batches leaves the next one untried"
        assert found.next_bytes is None
    else:
        assert found.next == batches[batches.index(found.largest) + 1 if found.largest else 0]
        assert found.next_bytes == tried[found.next] > budget
    assert found == largest_batch(total_bytes, budget, **options)
    return found, [one for one in said if one is not None]


def truth(total_bytes, budget: int, cap: int) -> int:
    """The largest batch that fits, by trying all of them; for functions that only rise."""
    return max((batch for batch in range(1, cap + 1) if total_bytes(batch) <= budget), default=0)


fixed = st.integers(0, 60 * GIB)
slopes = st.integers(1, 4 * GIB)
budgets = st.integers(1, 80 * GIB)
caps = st.integers(1, 3000)


@settings(max_examples=50)
@given(fixed, slopes, budgets, caps, st.booleans())
def test_affine_bytes_take_at_most_four_compiles(state, per_sequence, budget, cap, state_is_known):
    def total(batch):
        return state + per_sequence * batch

    found = search(total, budget, batches=range(1, cap + 1), fixed_bytes=state if state_is_known else 0)
    assert found.largest == truth(total, budget, cap)
    assert len(found.tried) <= 4
    if state_is_known:
        assert len(found.tried) <= 3


@given(fixed, slopes, slopes, st.integers(1, 200), budgets, caps)
def test_a_knee_costs_compiles_but_not_the_answer(state, before, after, knee, budget, cap):
    def total(batch):
        return state + before * min(batch, knee) + after * max(0, batch - knee)

    found = search(total, budget, batches=range(1, cap + 1))
    assert found.largest == truth(total, budget, cap)
    assert len(found.tried) <= 1 + 12 + 4  # the first one; halving, as log2(3000) is below 12; what predictions may take


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.integers(1, 100), st.integers(1, 12))
def test_any_function_at_all_gives_a_tried_pair(bytes_by_batch, budget, start):
    """Non-monotone bumps included: `search` checks the pair; the largest of all fitting batches isn't claimed."""
    found = search(lambda batch: bytes_by_batch[batch - 1], budget, batches=range(1, len(bytes_by_batch) + 1), start=start)
    assert len(found.tried) <= 8 + 4


@given(budgets, st.integers(1, 80 * GIB), caps)
def test_constant_bytes(budget, total, cap):
    assert search(lambda _: total, budget, batches=range(1, cap + 1)).largest == (cap if total <= budget else 0)


@given(st.integers(0, 40), st.integers(1, 10), st.integers(1, 300), budgets)
def test_steps_of_a_padding_allocator(state, width, step, budget):
    def total(batch):
        return (state + (batch + width - 1) // width * step) * GIB // 100

    assert search(total, budget, batches=range(1, 4097)).largest == truth(total, budget, 4096)


@pytest.mark.parametrize(
    ("total", "budget", "options", "expected"),
    [
        (lambda b: 10 + b, 110, {}, (100, 110, 111)),
        (lambda b: 10 + b, 110, {"fixed_bytes": 10}, (100, 110, 111)),
        (lambda b: 10 + b, 11, {}, (1, 11, 12)),
        (lambda b: 10 + b, 10, {}, (0, None, 11)),
        (lambda b: 10 + b, 10**9, {}, (10**9 - 10, 10**9, 10**9 + 1)),
        (lambda b: 10 + b, 10**9, {"batches": range(1, 8)}, (7, 17, None)),
        (lambda b: 10 + b, 10**9, {"batches": [1]}, (1, 11, None)),
        (lambda b: 10 + b, 5, {"batches": [1]}, (0, None, 11)),
        (lambda b: 10 + b, 18, {"start": 8}, (8, 18, 19)),
        (lambda b: 10 + b, 110, {"batches": [1, 2, 4, 8, 64, 512]}, (64, 74, 522)),
        (lambda b: 10 + b, 110, {"batches": [128, 512]}, (0, None, 138)),
        (lambda b: 1000 - b, 999, {}, (MAX_BATCH, 1000 - MAX_BATCH, None)),  # falling bytes: nonsense, but no endless loop
    ],
)
def test_examples(total, budget, options, expected):
    found = search(total, budget, **options)
    assert (found.largest, found.largest_bytes, found.next_bytes) == expected


@given(st.integers(64, 2**20), st.integers(0, 2**30), st.integers(1, 2**25))
def test_small_samples_fill_the_memory(per_sample, state, workspace):
    """A few hundred bytes a sample, beside workspaces that only larger batches take, and blocks of 256 bytes."""

    def total(batch):
        return state + min(workspace, 2**12 * batch) + -(-per_sample * batch // 256) * 256

    found = search(total, 60 * GIB)
    assert found.largest_bytes is not None
    assert 60 * GIB - found.largest_bytes <= per_sample + 256 + 2**12
    fitting = 1 / GROWTH
    for batch, num_bytes in found.tried:
        assert batch <= max(8, GROWTH * fitting)
        fitting = max(fitting, batch) if num_bytes <= 60 * GIB else fitting


@pytest.mark.parametrize(
    ("total", "budget", "options", "expected"),
    [
        (lambda b: 10 + b, 110, {}, []),  # 8 and 100 fit, and 101 doesn't
        (lambda b: 10 + 2 * b, 25, {}, [7]),  # 8 doesn't fit, and 7 does
        (lambda b: 10 + b * b, 410, {"start": 4}, [*range(10, 1, -1)]),  # 4 fits and 63 doesn't; log2(58) is below 6
        (lambda b: 10 + b, 14, {"batches": [1, 2, 4, 8]}, [4, 3]),
        (lambda b: 10 + b, 10**9, {"batches": [1]}, [1]),
        (lambda b: 10 + b, 10**9, {"batches": [1, 10**6]}, []),
    ],
)
def test_a_search_says_how_many_compiles_it_takes_at_most(total, budget, options, expected):
    """Before a batch that doesn't fit is known, there is no such number, unless the batches are few."""
    said = []
    largest_batch(total, budget, expect=said.append, **options)
    assert said == expected


@given(fixed, slopes, budgets, caps)
def test_two_compiles_estimate_the_answer_of_a_line(state, per_sequence, budget, cap):
    """One compile does where the bytes of no sequence are known."""

    def total(batch):
        return state + per_sequence * batch

    found, said = estimated(total, budget, batches=range(1, cap + 1))
    assert said[1:] == [found.largest] * (len(found.tried) - 2)
    _, known = estimated(total, budget, batches=range(1, cap + 1), fixed_bytes=state)
    assert {*known} <= {found.largest}


def test_the_answer_and_its_proof_are_begun_together():
    """Once two compiles have made a line."""
    begun = list[int]()
    search = search_upwards(lambda batch: 10 + 7 * batch, 1000, begin=begun.append)
    assert [(next(search), begun[:]) for _ in range(3)] == [(None, [8]), (121, [8, 121]), (141, [8, 121, 141, 142])]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.integers(1, 100))
def test_an_estimate_is_within_what_is_proven(bytes_by_batch, budget):
    found, said = estimated(lambda batch: bytes_by_batch[batch - 1], budget, batches=range(1, len(bytes_by_batch) + 1))
    fits, fails = 0, len(bytes_by_batch) + 1
    for estimate, (batch, num_bytes) in zip(said, found.tried[:-1], strict=True):
        fits, fails = (batch, fails) if num_bytes <= budget else (fits, batch)
        assert fits <= estimate < fails


def test_batches_to_look_at_are_few_and_near_each_other():
    batches = range(1, MAX_BATCH + 1)
    few = spaced(batches)
    assert list(few[:4096]) == list(range(1, 4097))
    assert (few[-1], len(few) < 50_000) == (MAX_BATCH, True)
    assert all(low < high <= low * 1.0005 + 1 for low, high in itertools.pairwise(few[4095:]))
    assert spaced([1, 2, 6]) == [1, 2, 6]
    assert list(spaced(range(1, 4099))) == list(range(1, 4099))


@given(fixed, slopes, budgets, st.integers(1, 5000))
def test_a_global_batch_takes_at_most_five_compiles(state, per_sequence, budget, global_batch):
    def total(batch):
        return state + per_sequence * batch

    batches = divisors(global_batch)
    found = search(total, budget, batches=batches, fixed_bytes=state)
    assert found.largest == max((batch for batch in batches if total(batch) <= budget), default=0)
    assert len(found.tried) <= 5


@pytest.mark.parametrize(("number", "expected"), [(1, (1,)), (12, (1, 2, 3, 4, 6, 12)), (13, (1, 13))])
def test_divisors(number, expected):
    assert divisors(number) == expected


def test_a_bump_is_why_the_claim_is_a_pair():
    """Batch 9 has a bump over the budget, 10 fits again: the pair (8, 9) is proved, and nothing more is claimed."""

    def total(batch):
        return 100 * batch + (500 if batch == 9 else 0)

    found = search(total, 1000, batches=range(1, 10))
    assert (found.largest, found.next_bytes) == (8, 1400)


def test_a_batch_of_fewer_bytes_than_a_smaller_one_leads_nowhere():
    """XLA took 56.79 GiB for 32 sequences and 55.65 for 33. The line through the two doesn't say what 34 takes."""
    found = search(lambda batch: {32: 5679, 33: 5565}.get(batch, 156 * batch + 650), 5933, start=32, fixed_bytes=300)
    assert [batch for batch, _ in found.tried] == [32, 33, 66, 35, 34]


@pytest.mark.parametrize("options", [{"batches": []}, {"start": 0}, {"batches": [0, 1]}])
def test_counting_starts_at_one(options):
    start, batches = options.get("start", FIRST_BATCH), options.get("batches", range(1, MAX_BATCH + 1))
    with pytest.raises(ValueError, match=re.escape(f"{start} and {batches!r}")):
        largest_batch(lambda b: b, 10, **options)


def test_a_failing_compile_passes_through():
    def refuse(batch):
        raise RuntimeError(str(batch))

    with pytest.raises(RuntimeError, match=r"^8$"):
        largest_batch(refuse, 10)


@pytest.mark.parametrize(
    ("given_", "num_bytes", "terms"),
    [
        ({"requested_bytes": 5 * GIB, "memory_bytes": 80 * GIB}, 5 * GIB, ["--budget"]),
        ({"requested_bytes": 5 * GIB, "memory_bytes": None}, 5 * GIB, ["--budget"]),
        ({"memory_bytes": 80 * GIB}, 60 * GIB, ["0.75", "80.00 GiB"]),
        ({"memory_bytes": 80 * GIB, "mem_fraction": 0.9}, 72 * GIB, ["0.9", "80.00 GiB"]),
        ({"memory_bytes": 60 * GIB, "attached": True}, 60 * GIB, ["60.00 GiB"]),
        ({"memory_bytes": 60 * GIB, "attached": True, "in_use_bytes": 2 * GIB}, 58 * GIB, ["60.00 GiB", "2.00 GiB"]),
    ],
)
def test_budget_terms(given_, num_bytes, terms):
    budget = make_budget(**{"requested_bytes": None, "mem_fraction": 0.75, **given_})
    assert budget.num_bytes == num_bytes
    assert [term for term in terms if term not in budget.terms] == []


@pytest.mark.parametrize(
    ("given_", "pool_bytes"),
    [
        ({"memory_bytes": 80 * GIB}, 60 * GIB),
        ({"memory_bytes": 80 * GIB, "mem_fraction": 0.9, "headroom": 0.1}, 72 * GIB),
        ({"memory_bytes": 80 * GIB, "requested_bytes": 5 * GIB}, 60 * GIB),
        ({"memory_bytes": 80 * GIB, "requested_bytes": 70 * GIB}, 70 * GIB),
        ({"memory_bytes": 60 * GIB, "requested_bytes": 70 * GIB, "attached": True}, 60 * GIB),
        ({"memory_bytes": 60 * GIB, "in_use_bytes": 2 * GIB, "attached": True}, 60 * GIB),
        ({"memory_bytes": None}, None),
    ],
)
def test_the_pool_of_a_job(given_, pool_bytes):
    assert make_budget(**{"requested_bytes": None, "mem_fraction": 0.75, **given_}).pool_bytes == pool_bytes


def test_a_cpu_has_the_memory_that_is_free_here():
    budget = make_budget(requested_bytes=None, mem_fraction=0.75, memory_bytes=None)
    with open("/proc/meminfo") as file:
        kib = {line.split(":")[0]: int(line.split()[1]) for line in file if "kB" in line}
    assert 0 < budget.num_bytes <= kib["MemTotal"] * 1024

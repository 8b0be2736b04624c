"""The sentences that say what a step saves and recomputes."""

from dataclasses import replace

from jaxremat.report.kept import kept_sentences
from jaxremat.trial.details import LintFinding, RunsAgain, SavedForBackward, WhatWasKept
from tests.made_up_records import trial

KEPT = WhatWasKept(
    num_checkpoints=12,
    again=(RunsAgain("matmul", 73, 48, 48, 300), RunsAgain("attention", 12, 12, 12, 100)),
    saved=(
        SavedForBackward("name", "mlpwi_0", 12, 2**31, False),
        SavedForBackward("name", "context", 12, 2**30, True),
        SavedForBackward("input", "", 12, 2**29, False),
    ),
    unread_names=("mlpwo",),
    unmatched_names=(),
)


def row(kept=KEPT, **changes):
    return replace(trial(8), **{"executed_flops": 1400, "recompute_overhead_percent": 40.0, "kept": kept, **changes})


def said(**changes):
    (sentence,) = kept_sentences([row(**changes)])
    return sentence


def test_the_sentence_of_a_policy():
    assert said() == (
        "Saved: mlpwi_0 (2.00 GiB), 12 layer inputs (0.500 GiB), context in the host's memory (1.00 GiB). Recomputed: 48 of 73 "
        "matmuls and 12 of 12 attention kernels (40.0% more FLOPs). Named, but not needed by the backward pass: mlpwo."
    )


def test_the_sentence_leaves_to_the_lint_what_the_lint_says():
    kept = replace(KEPT, saved=(), unread_names=(), unmatched_names=("hiden",))
    sentence = "Saved: nothing. Recomputed: 48 of 73 matmuls and 12 of 12 attention kernels (40.0% more FLOPs)."
    assert said(kept=kept, findings=(LintFinding("unmatched-name", "", "", 0, ""),)) == sentence
    assert said(kept=kept) == f"{sentence} Named, but carried by no value: hiden."


def test_the_sentence_of_a_step_without_checkpoints():
    none = (RunsAgain("matmul", 73, 0, 0, 0), RunsAgain("convolution", 1, 0, 0, 0), RunsAgain("attention", 12, 0, 0, 0))
    kept = WhatWasKept(0, none, (), (), ())
    assert said(kept=kept) == (
        "Saved: all that differentiation asks for. Recomputed: no matmul, no convolution and no attention kernel."
    )
    assert said(kept=replace(kept, again=())) == "Saved: all that differentiation asks for. No matmul is in this step."


def test_the_sentence_says_what_xla_merged_and_what_runs_more_than_once():
    kept = replace(KEPT, saved=(), unread_names=(), again=(RunsAgain("matmul", 6, 3, 0, 0),))
    assert said(kept=kept) == (
        "Saved: nothing. Recomputed: no matmul. "
        "XLA merged the recompute of 3 matmuls with equal ones, and saves the results."
    )
    kept = replace(kept, again=(RunsAgain("matmul", 73, 132, 132, 400), RunsAgain("kernel", 1, 1, 1, 0)))
    assert "Recomputed: 132 runs of 73 matmuls and 1 of 1 other kernel (40.0% more FLOPs)." in said(kept=kept)


def test_long_lists_of_names_are_shortened():
    names = tuple(SavedForBackward("name", name, 1, 2**30, False) for name in "abcdef")
    assert said(kept=replace(KEPT, saved=names)).startswith("Saved: a, b, c and 3 more (6.00 GiB).")


def test_several_policies_are_told_apart():
    rows = [row(), row(policy="nothing"), row(policy="nothing", batch=16), row(policy="none", kept=None)]
    assert [sentence.partition(" Saved:")[0] for sentence in kept_sentences(rows)] == ["dots:", "nothing:"]

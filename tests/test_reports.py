"""What a person reads: each table, sentence and heading, made from records that no step was run for.

A word is compared here and nowhere else: `python -m pytest tests/test_reports.py --snapshot-update` takes the new ones. What
the numbers are is tested beside the modules that make them.
"""

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from jaxremat.answer.savings import Saving
from jaxremat.chips.nvidia.nvml import Gpu, GpuProcess, Reading
from jaxremat.chips.target import Target, load_target
from jaxremat.cli.command import parse_flags
from jaxremat.knapsack.prices import FurtherBudget, Price
from jaxremat.mesh.axes import MeshShape
from jaxremat.policy.code import as_code
from jaxremat.report import doctor
from jaxremat.report.doctor import Row
from jaxremat.report.meshes import mesh_sentence
from jaxremat.report.page import PageInput, write_page
from jaxremat.report.plan import code_to_paste, plan_sentences
from jaxremat.report.printer import ExplainPrinter, Printer, Report, print_no_fit
from jaxremat.report.progress import Progress
from jaxremat.report.recommend import best_sentences, explanations, policies_in_full, ranked, recommend_table
from jaxremat.report.saved import saved_sentences
from jaxremat.report.sentences import (
    attached_sentences,
    job_sentences,
    largest_sentence,
    no_mfu_sentences,
    no_suggestion_sentence,
    own_sentences,
    state_sentences,
)
from jaxremat.report.steps import predicted_title, step_title
from jaxremat.report.sweep import Line, failure_sentences, sweep_table
from jaxremat.report.training import TrainingPrinter
from jaxremat.search.buckets import Bucket, Bucketed
from jaxremat.search.histogram import Histogram
from jaxremat.session.flags import RunFlags
from jaxremat.session.request import check_run
from jaxremat.session.session import Session
from jaxremat.training.metrics import StepMetrics
from jaxremat.trial.bucketed import lengths_record
from jaxremat.trial.comparisons import MeshChoiceRecord
from jaxremat.trial.details import (
    AllocatorBytes,
    ComparedMesh,
    HeldBytes,
    LargeBuffer,
    PeakPlace,
    PlannedLayout,
    StateOnMesh,
    TriedStep,
)
from jaxremat.trial.queue import SweepTrial
from jaxremat.trial.recommendation import recommendation
from jaxremat.trial.record import Record, SuggestionRecord
from jaxremat.xla.step_facts import Finding, Recomputed, SavedAndRecomputed, SavedValues
from tests.browser import Shown, missing_piece, start_browser
from tests.made_up_records import GIB, NO_BYTES, explained, measured, plan, record, search, step, unmeasured
from tests.memory_maps import scanned

pytestmark = pytest.mark.any_jax


class Paper:
    """A terminal of `width` columns, and what is on it. No line is wider, except for code to paste and lines of progress."""

    def __init__(self, width: int = 80):
        self.width, self.out = width, io.StringIO()
        self.console = Console(width=width, file=self.out)
        self.report = Report(self.console)

    def show(self, *parts: RenderableType, wraps: bool = True) -> str:
        for part in parts:
            self.console.print(part, markup=False, highlight=False)
        lines = [line.rstrip() for line in self.out.getvalue().splitlines()]
        assert not wraps or max(map(len, lines)) <= self.width
        return "\n".join(lines)


def answers(*policies: list[Any], explain: bool = False, **options: Any) -> str:
    """What `jaxremat.run` prints of the records of each policy."""
    paper = Paper()
    printer = Printer(paper.report, explain=explain)
    for records in policies:
        for one in records:
            printer.row(one)
        printer.policy_done()
    printer.all_done("h100-80gb", **options)
    return paper.show(wraps=not explain)


SAVED = SavedAndRecomputed(
    num_checkpoints=12,
    again=(Recomputed("matmul", 73, 48, 48, 300), Recomputed("attention", 12, 12, 12, 100)),
    saved=(
        SavedValues("name", "mlpwi_0", 12, 2 * GIB, False),
        SavedValues("name", "context", 12, GIB, True),
        SavedValues("input", "", 12, GIB // 2, False),
    ),
    unread_names=("mlpwo",),
    unmatched_names=(),
)
FOUND = Finding("attention-twice", "12 kernels of 24 run twice", "--policy dots+attention", GIB, "layers.py:7")
LONG = "save:" + ",".join("abcdefghijklm")


def test_a_column_of_step_times_says_whether_they_were_measured():
    titles = {step_title(rows) for rows in ([step()], [measured()], [step(), measured()])}
    assert len(titles) == 3


def test_what_is_printed_of_a_search_that_was_ended(snapshot):
    """The batches of a search, the best step of a plan so far, and the meshes of which some have no answer yet."""
    paper = Paper()
    printer = Printer(paper.report)
    for batch, fits in ((8, True), (24, False)):
        printer.row(step("dots", batch, record="probe", fits=fits))
    printer.policy_done()
    printer.so_far(lambda: step("save:a,b", 8, record="probe"))
    printer.policy_done()
    compared = (
        ComparedMesh("fsdp=2", GIB, 8, 2 * GIB, 1000.0, 990.0, 3),
        ComparedMesh("data=2", GIB, bound_tokens_per_s=2000.0, num_compiles=1, left_out="not finished"),
    )
    known: dict[str, Any] = dict(model="gpt2", requested_policy="auto", target="h100-80gb", seq_len=1024, num_devices=2)
    known |= dict(num_nodes=1, budget_bytes=16 * GIB, loss="full", layout="loop", num_compiles=4, versions={})
    for mesh, meshes in (("fsdp=2", compared), (None, compared[1:])):
        printer.so_far(partial(MeshChoiceRecord, **known, mesh=mesh, meshes=meshes, is_complete=False))
        printer.policy_done()
    printer.policy_done()  # nothing is printed twice
    assert snapshot == paper.show()


def test_an_answer_replaces_what_was_found_before(capsys):
    printer = Printer(Report(Paper().console, as_json=True))
    printer.so_far(lambda: step("save:a", 8, record="probe"))
    printer.so_far(lambda: step("save:b", 9, record="probe"))
    printer.policy_done()
    printer.so_far(lambda: step("auto", 10, record="probe"))
    printer.row(plan())
    printer.policy_done()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["record"], row["batch"], row["policy"]) for row in found] == [("probe", 9, "save:b"), ("plan", 8, "dots")]


def test_the_best_step_of_a_plan_that_was_ended_is_beside_the_other_policies():
    paper = Paper()
    printer = Printer(paper.report)
    printer.row(step("dots", 8, step_s=0.01))
    printer.policy_done()
    best = step("save:a,b", 8, step_s=0.005, record="probe", requested_policy="auto", code=("THE CODE",))
    printer.so_far(lambda: best)
    printer.policy_done()
    printer.all_done("h100-80gb")
    shown = paper.show()
    _, both = shown.split("policies side by side")
    assert "search ended early" in both
    assert "dots" in both
    assert shown.count("THE CODE") == 1
    assert printer.answers[-1] is best
    assert printer.exit_code() == 0


def test_a_missing_mfu_has_a_reason():
    known, untimed = step("none", executed_flops=9), step("every:2+dots", step_s=None, mfu=None)
    of_cpu = step("dots", mfu=None, predicted=None)
    more = step("nothing", mfu=None, findings=(Finding("more-than-its-share", "e", "r"),))
    without_flops, contradicting = step("save:a", mfu=None, executed_flops=0), step("save:b", mfu=None, executed_flops=9)
    assert no_mfu_sentences([known, untimed, step("dots", error="e", mfu=None)]) == []
    assert "under" not in (alone := no_mfu_sentences([of_cpu, untimed]))[0]
    assert len(alone) == 1
    said = no_mfu_sentences([known, of_cpu, more, without_flops, contradicting, step("save:c", mfu=None, predicted=None)])
    assert len({line.partition(": ")[2] for line in said}) == 4
    assert said[0].startswith("No MFU under dots, save:c: ")


def test_policies_side_by_side(snapshot):
    """One that fits, one that doesn't, one whose step failed, one without a record of a step, and two with other names."""
    found = search(f"{LONG}+attention", requested_policy="minimal", largest_batch=16)
    assert snapshot == answers(
        [step("dots", 4, record="probe"), step("dots", 8, kept=SAVED, findings=(FOUND,))],
        [step("none", 8, 0.008, fits=False, total_bytes=20 * GIB, argument_bytes=17 * GIB, temp_bytes=3 * GIB)],
        [step(LONG, 8, None, **NO_BYTES, fits=None, error="RESOURCE_EXHAUSTED: x", error_kind="oom")],
        [record(8)],
        [step(f"{LONG}+attention", 16, requested_policy="minimal"), found],
        [
            step(
                "nothing",
                8,
                0.012,
                requested_policy="full",
                accumulate=2,
                predicted_interval=(-0.12, 0.12),
                host_temp_bytes=GIB,
                loss="chunked",
            )
        ],
    )


def test_policies_beside_the_author_s_own_checkpoints(snapshot):
    own, other = step("own", 8, 0.011), step("save:a", 16, 0.02, requested_policy="auto", total_bytes=9 * GIB)
    assert snapshot == answers([own], [other])
    no_fit = [explained("own", 8, total_bytes=20 * GIB, fits=False), explained("nothing", 8, total_bytes=4 * GIB, fits=True)]
    paper = Paper()
    printer = ExplainPrinter(paper.report)
    for row in no_fit:
        printer.row(row)
    printer.all_done()
    assert paper.show().splitlines()[-2:] == snapshot


def test_a_policy_of_the_same_bytes_as_the_author_s_checkpoints():
    (said,) = own_sentences([step("own", 8, 0.011), step("dots", 8, 0.01)])
    assert said.endswith("and takes as many bytes as it.")


@pytest.mark.parametrize("host", [None, 12 * GIB], ids=["device", "host"])
def test_an_attached_gpu(host, snapshot):
    """Both batches of a search were run, and three policies are ranked."""
    searched = [
        unmeasured(batch=4, record="probe", predicted_s=0.02, host_temp_bytes=host),
        measured(batch=128, step_s=1.2345, predicted_s=1.3, host_temp_bytes=host, accumulate=16, outside_bytes=GIB // 2),
        unmeasured(batch=129, predicted_s=1.4, host_temp_bytes=host, fits=False, ran="oom", ran_error="x"),
        search(ran="ok", next_ran="oom"),
    ]
    others = [[measured("none", 4, 0.01, 0.008)], [measured("nothing", 16, 0.048, 0.027, outside_bytes=GIB)]]
    assert snapshot == answers(searched, *others)


def test_what_a_search_found(snapshot):
    changes: list[dict[str, Any]] = [
        {},
        {"ran": "ok", "next_ran": "oom"},
        {"ran": "ok", "next_ran": "ok"},
        {"ran": "ok", "next_ran": "timeout"},
        {"ran": "ok", "next_batch": None},
        {"ran": "ok", "next_ran": "oom", "compiled_largest_batch": 130},
        {"ran": "oom"},
        {"largest_batch": 0, "compiled_largest_batch": 1, "next_batch": 1, "next_ran": "oom"},
        {"largest_batch": 0, "next_batch": 1},
        {"next_batch": None, "max_batch": None},
        {"global_batch": 512, "next_batch": 256},
        {"global_batch": 128, "next_batch": None},
    ]
    assert snapshot == "\n".join(largest_sentence(search(**one)) for one in changes)


def test_memory_outside_the_pool(snapshot):
    process = measured(outside_bytes=GIB // 2, outside_source="process")
    card = measured(batch=9, outside_bytes=3 * GIB // 4, outside_source="card")
    assert snapshot == "\n".join(attached_sentences([process]) + attached_sentences([process, card]))
    assert len(attached_sentences([measured()])) == 1
    assert attached_sentences([step()]) == []


def test_a_frontier(snapshot):
    paper = Paper()
    printer = Printer(paper.report)
    auto = step(LONG, step_s=0.015, total_bytes=7 * GIB, requested_policy="auto", xla_remat_above_bytes=6 * GIB)
    for one in (step("none", step_s=0.01, num_xla_remat=3), step("dots", step_s=0.02, total_bytes=5 * GIB), record(8), auto):
        printer.row(one)
    printer.policy_done(as_frontier=True)
    assert snapshot == paper.show()


def test_a_job_s_step_is_another_above_a_limit_alone():
    below, above = (step(xla_remat_above_bytes=limit * GIB) for limit in (10, 9))
    assert job_sentences([step(), below]) == []
    assert job_sentences([below, above]) == job_sentences([above])
    assert "--xla_disable_hlo_passes=rematerialization" in job_sentences([above])[0]
    (offloading,) = job_sentences([replace(above, disabled_pass="a-pass")])
    assert "--xla_disable_hlo_passes=a-pass,rematerialization" in offloading


def test_the_widest_interval_heads_the_times(snapshot):
    intervals: Any = ([None], [(-0.12, 0.12), None], [(-0.12, 0.12), (-0.06, 0.36)])
    titles = [predicted_title([step(predicted_interval=one) for one in some]) for some in intervals]
    assert max(len(line) for title in titles for line in title.splitlines()) <= len("predicted"), "no column is wider for it"
    assert snapshot == "\n\n".join(titles)


def suggestion(flags: str, total_bytes: int, **changes: Any) -> SuggestionRecord:
    known: dict[str, Any] = dict(model="gpt2", target="h100-80gb", policy="dots", loss="full", optimizer="adamw", batch=8)
    known |= dict(accumulate=1, budget_bytes=16 * GIB, step_s=0.01, step_source="predicted", tokens_per_s=1000.0)
    known |= dict(flags=flags, total_bytes=total_bytes, num_compiles=1, versions={})
    return SuggestionRecord(**known | changes)


BUFFERS = (
    LargeBuffer("residuals", "decoder_layer_input", "bf16[12,8,1024,768]", 12, "f.1", "", "/x/layers.py:7", GIB),
    LargeBuffer("parameters", "state.params['mlp']['kernel']", "f32[12,768,3072]", 1, "p.1", "", "", GIB // 2),
    LargeBuffer("other", "custom-call.*{0}", "f32[48,1024,1024]", 12, "c.2", "", "", GIB // 4, 12),
)


def test_what_fits_instead(snapshot):
    paper, least = Paper(), suggestion("--policy nothing", 17 * GIB)
    fitting = [suggestion("--policy nothing", GIB), suggestion("--policy nothing --batch 4", GIB // 2, step_s=0.005)]
    print_no_fit(paper.report, explained(largest=BUFFERS), fitting, None)
    print_no_fit(paper.report, None, [], least)
    assert snapshot == paper.show(no_suggestion_sentence(None), no_suggestion_sentence(replace(least, loss="own")))


def test_a_state_that_is_over_the_budget_is_divided():
    """A larger device alone rarely holds it."""
    assert state_sentences(10 * GIB, 10 * GIB, 10 * GIB) == []
    for whole, num_devices in ((11, 2), (15, 2), (16, 4), (100, 16)):
        (line,) = state_sentences(11 * GIB, whole * GIB, 10 * GIB)
        assert line.endswith(f"--devices {num_devices} divides them.")


def test_the_seconds_of_a_plan(snapshot):
    """They have digits that mean something."""
    seconds = [(0.01448, 0.01409), (3.0852e-5, 3.0048e-5), (4e-9, 0.0), (None, 2.5e-4)]
    plans = [plan(recompute_s=s, bound_s=bound, predicted_total_bytes=None if s is None else GIB) for s, bound in seconds]
    assert snapshot == "\n".join(plan_sentences(one)[-1] for one in plans)


def planned(first: Any, second: Any, **changes: Any) -> Record:
    layouts = tuple(PlannedLayout(one, "dots", "full", 8, GIB, s, 8192 / s, c) for one, s, c in (first, second))
    return plan(
        layouts=layouts,
        layout=layouts[0].layout,
        **dict(loss="full", policy="save:mlpwi_0,out_proj", layers=("save:mlpwi_0,out_proj",) * 2 + ("nothing",)),
        prices=(Price("mlpwi_0", GIB // 4, 2e-3, True, False), Price("context", GIB // 8, 1e-4, False, True)),
        more=(FurtherBudget(GIB, 1e-3),),
        config={"model": {"num_layers": 3, "scan_layers": first[0] == "loop"}},
        **changes,
    )


def test_a_plan_of_many_kinds_of_layers_fits_on_a_screen():
    few, many = (plan_sentences(plan(layers=tuple(f"kind{n}: dots" for n in range(count)))) for count in (8, 40))
    assert len(few) == len(many) <= 20
    assert [count for count in ("7 further", "33 further") if any(count in line for line in many)] == ["33 further"]


def test_a_plan(snapshot):
    """With what tensors are worth and code to paste: in both layouts, as a named policy, and of a workload's own loss."""
    unrolled = planned(("unrolled", 0.1, 20.0), ("loop", 0.11, 5.0), max_batch=8)
    looped = planned(("loop", 0.1, 5.0), ("unrolled", 0.11, 20.0), disabled_pass="a-pass")
    named: dict[str, Any] = dict(predicted_total_bytes=None, recompute_s=None, unrolled_error="CompileError: x")
    tried = (TriedStep("nothing", "own", 8, GIB, 0.25),)
    rows = [unrolled, looped, plan(**named, tried=tried), plan(**named, policy="nothing"), plan(objective="memory", **named)]
    by_name = plan(policy="save:hidden,dot_general.3", loss="own", sources={"dot_general.3": "/home/me/net/model.py:8"})
    rows += [by_name, plan(policy="dots", loss="own", as_code=tuple(as_code("dots", "nnx").splitlines()))]
    assert snapshot == answers([step(LONG, requested_policy="auto"), *rows], explain=True)


def test_a_plan_names_the_least_compiled_step_that_is_as_fast():
    """At a smaller batch, say, whose rate the predicted times don't tell from the plan's."""
    chosen, slow = TriedStep("dots", "own", 8, 4 * GIB, 0.25, None, 4), TriedStep("nothing", "own", 2, GIB, 0.4, None, 16)
    near = TriedStep("nothing", "own", 4, 2 * GIB, 0.26, None, 8)
    known = dict[str, Any](paired_error=0.1, total_bytes=4 * GIB, budget_bytes=4 * GIB, tried=(slow, near, chosen))

    def said(**changes: Any) -> list[str]:
        lines = plan_sentences(plan(**known | changes))
        found = [line for line in lines if line.startswith("Batch")]
        assert any(line.startswith("They are as fast: ") for line in lines) is bool(found)
        return found

    of_least = ["Batch 8 x 4 under nothing takes 2.00 GiB, and is predicted 3.8% slower."]
    assert said() == of_least
    others = said(tried=(slow, chosen)), said(objective="batch"), said(paired_error=0.03), said(total_bytes=2 * GIB)
    assert others == ([], [], [], [])
    without = replace(near, policy="none", total_bytes=5 * GIB)
    of_none = ["Batch 8 x 4 under none, without checkpoints, takes 5.00 GiB, and is predicted 3.8% slower."]
    assert said(tried=(slow, near, chosen, without), budget_bytes=6 * GIB) == of_least + of_none
    assert said(tried=(slow, near, chosen, without)) == of_least


def test_code_of_each_policy_is_printed_once_after_its_answer():
    """That of a plan's trial is the plan's."""
    named, of_plan = ((f'loss = jaxremat.with_policy(loss, "{policy}")',) for policy in ("nothing", "dots"))
    rows = [step("nothing", 4, code=named), step("nothing", 8, code=named)]
    text = answers(rows, [plan(), step("dots", requested_policy="auto", code=of_plan)])
    assert [text.count(*lines) for lines in (named, of_plan)] == [1, 1]
    assert text.index("Batch 8 fits") < text.index(*named) < text.index("Planned") < text.index(*of_plan)
    assert text.count("with_policy") == 2


def test_code_of_an_own_model_is_around_its_loss_whatever_the_loss_is_called():
    """An own function may have the keyword loss. Lines of its own configuration come in place of the loss."""
    model: dict[str, Any] = {"config": {"model": {"layers": ("block_*",)}}}
    for step_of in (plan(loss="chunked", **model), step("dots", loss="chunked", **model)):
        assert code_to_paste(step_of, (), ()) == ["loss = jaxremat.with_policy(loss, \"dots\", layers=('block_*',))"]
        assert code_to_paste(step_of, (), ("remat_policy: full",)) == ["remat_policy: full"]


def at(seq_len: int, policy: str, fits: bool, samples_per_s: float = 100.0, **changes: Any) -> Any:
    known: dict[str, Any] = dict(seq_len=seq_len, fits=fits, samples_per_s=samples_per_s, tokens_per_s=None)
    return step(policy, step_s=8 / samples_per_s, **known | changes)


def test_several_lengths(snapshot):
    auto: dict[str, Any] = dict(requested_policy="auto")
    rows = [at(8192, "dots", True), at(131072, "dots", False), at(131072, "nothing", False, total_bytes=18 * GIB, **auto)]
    rows += [at(1024, LONG, True, **auto), at(8192, f"{LONG}+attention", True, **auto)]
    assert snapshot == answers(*([row] for row in rows))


@pytest.mark.parametrize("fits", [True, False])
def test_a_data_set_in_buckets(fits, snapshot):
    data = Bucketed(Histogram(((60, 3), (500, 1))), 1, (Bucket(64, 3, 180), Bucket(512, 1, 500)))
    rows = [at(64, "dots", True), at(512, "nothing" if fits else "dots", fits, 20)]
    found = lengths_record(data, Path("some.txt"), rows, 5)
    assert snapshot == answers(*([row] for row in rows), lengths=found)


def test_meshes(snapshot):
    shapes = (
        ComparedMesh("fsdp=8", 11 * GIB, 4, 50 * GIB, 13_000.0, 12_000.0, 3),
        ComparedMesh("fsdp=4,tensor=2", 11 * GIB, 8, 52 * GIB, 11_500.0, 11_000.0, 2),
        ComparedMesh("data=8", 89 * GIB, left_out="the state alone is over the budget"),
    )
    near = ComparedMesh(
        "data=2,fsdp=4", 22 * GIB, bound_tokens_per_s=12_051.0, num_compiles=1, left_out="at most 0.5% faster"
    )
    known: dict[str, Any] = dict(model="m", requested_policy="auto", target="h100-80gb", seq_len=1024, num_devices=8)
    known |= dict(num_nodes=1, budget_bytes=60 * GIB, loss="chunked", layout="loop", mesh="fsdp=8", num_compiles=5)
    best = MeshChoiceRecord(**known, meshes=shapes, versions={})
    none = tuple(replace(one, tokens_per_s=None) for one in shapes)
    others = [
        replace(best, requested_policy="dots", meshes=shapes[::2], num_compiles=1, loss="own"),
        replace(best, meshes=none, num_nodes=2),
        replace(best, meshes=(replace(shapes[0], num_compiles=0), shapes[2])),
        replace(best, requested_policy="minimal", meshes=(*shapes, near)),
        replace(best, mesh=None, meshes=shapes[2:]),
        replace(best, mesh=None, meshes=shapes[2:], num_devices=1),
    ]
    paper = Paper()
    Printer(paper.report).mesh_chosen(replace(best, meshes=(*shapes, near)))
    assert snapshot == paper.show(*map(mesh_sentence, others))


@pytest.mark.parametrize(("bound", "error", "is_near"), [(950.0, 0.1, True), (900.0, 0.1, False), (950.0, None, False)])
def test_a_mesh_that_was_left_out_may_be_as_fast(bound, error, is_near):
    """By its upper bound, where predicted times don't tell the two apart. One whose step doesn't fit isn't."""
    shapes = (
        ComparedMesh("data=4", GIB, 8, 2 * GIB, 1000.0, 1000.0, 3),
        ComparedMesh("fsdp=4", GIB, bound_tokens_per_s=bound, num_compiles=1, left_out="slower at best"),
        ComparedMesh("tensor=4", GIB, 8, 20 * GIB, 2000.0, None, 1, "needs 20.00 GiB"),
    )
    known: dict[str, Any] = dict(
        model="m", requested_policy="auto", target="h100-80gb", seq_len=1, num_devices=4, num_nodes=1
    )
    known |= dict(budget_bytes=9 * GIB, loss="full", layout="loop", mesh="data=4", num_compiles=5, versions={})
    said = mesh_sentence(MeshChoiceRecord(**known, meshes=shapes, paired_error=error))
    assert ("one of the 2 fastest" in said) == is_near
    assert said.count("fsdp=4") == is_near
    assert "tensor=4" not in said


@pytest.mark.parametrize(("width", "by_cost"), [(80, False), (80, True), (120, True)])
def test_what_to_rent(width, by_cost, snapshot):
    def on(policy: str, tokens_per_s: float, **changes: Any) -> list[Record]:
        known: dict[str, Any] = dict(tokens_per_s=tokens_per_s, total_bytes=50 * GIB, mesh="fsdp=8", num_devices=8)
        return [step(policy, 2, budget_bytes=60 * GIB, **known | changes)]

    alone: dict[str, Any] = dict(mesh=None, predicted_interval=(-0.12, 0.12))
    none = on("none", 9.0, total_bytes=140 * GIB, fits=False)
    too_large = {"auto": on("nothing", 1.0, total_bytes=75 * GIB, fits=False)}
    several: dict[str, Any] = dict(predicted_interval=(-0.06, 0.36))
    auto: dict[str, Any] = dict(requested_policy="auto")
    without = on("none", 600.0, **alone)
    rows = ranked(
        [
            recommendation("m", "h100-80gb", 8, {"auto": [record()]}),
            recommendation("m", "h100-80gb", 8, too_large, none=none),
            recommendation("m", "h200", 1, {"auto": on("dots", 700.0, **alone, **auto)}, none=without),
            recommendation("m", "a100-80gb", 8, {"nothing": on("nothing", 400.0, **several), "dots": [record()]}, 1.0),
            recommendation("m", "h100-80gb", 8, {"auto": on(f"{LONG}+attention", 1000.0, **auto)}, 4.0, none=none),
        ],
        by_cost=by_cost,
    )
    table = recommend_table(rows, "what to rent for m", by_cost=by_cost, width=width)
    said = [*explanations(rows, by_cost=by_cost), *policies_in_full(rows)]
    text = Paper(width).show(*best_sentences(rows, by_cost=by_cost), table, *said)
    assert "…" not in text, "a number is cut"
    assert text == snapshot


def test_who_holds_the_memory(snapshot):
    """In full for each step, on a mesh and where it was run, and side by side."""
    residuals = [
        ("decoder_layer_input", GIB, 12),
        ("context", GIB // 2, 12),
        ("tanh", GIB // 512, 1),
        ("exp", GIB // 512, 1),
    ]
    sizes = {"parameters": GIB, "residuals": 3 * GIB // 2 + GIB // 256, "gaps": 3 * GIB // 2 - GIB // 256, "gradients": 0}
    sources = {"parameters": GIB, "activations": sizes["residuals"], "fragmentation": sizes["gaps"]}
    known: dict[str, Any] = dict(attribution=sizes, sources=sources)
    parts = tuple(HeldBytes("residuals", label, size, 1, layers) for label, size, layers in residuals)
    peak = PeakPlace(6, 9, "backward", "fusion.3", "fusion", "jit(f)/layers/mlp", "/x/layers.py:7")
    allocator = AllocatorBytes(in_use_bytes=2**20, peak_bytes=2**21, pool_bytes=GIB, largest_free_bytes=None)
    state = (StateOnMesh("parameters", 8 * GIB, GIB, 0), StateOnMesh("inputs", GIB, GIB, 0))
    paper = Paper()
    printer = ExplainPrinter(paper.report)
    printer.row(explained(**known, findings=(), held=parts, largest=BUFFERS, peak=peak))
    printer.row(explained("nothing", 4, **known, findings=(FOUND,), allocator=allocator))
    on_mesh: dict[str, Any] = dict(mesh="fsdp=8", num_devices=8, state=state, fits=False, host_bytes=GIB, accumulate=2)
    printer.row(explained(**known, **on_mesh))
    printer.row(explained("none", total_bytes=None, fits=None, error="XLA rejected it", error_kind="CompileError"))
    printer.all_done()
    assert snapshot == paper.show()


def test_what_a_step_saves_and_recomputes(snapshot):
    """Of each kind of step; and of several policies, told apart."""
    bare = replace(SAVED, saved=(), unread_names=())
    none = (Recomputed("matmul", 73, 0, 0, 0), Recomputed("convolution", 1, 0, 0, 0), Recomputed("attention", 12, 0, 0, 0))
    names = tuple(SavedValues("name", name, 1, GIB, False) for name in "abcdef")
    unmatched = replace(bare, unmatched_names=("hiden",))
    steps: dict[str, tuple[SavedAndRecomputed, tuple[str, ...]]] = {
        "policy": (SAVED, ()),
        "no checkpoints": (SavedAndRecomputed(0, none, (), (), ()), ()),
        "no matmul": (SavedAndRecomputed(0, (), (), (), ()), ()),
        "merged": (replace(bare, again=(Recomputed("matmul", 6, 3, 0, 0),)), ()),
        "several runs": (
            replace(bare, again=(Recomputed("matmul", 73, 132, 132, 400), Recomputed("kernel", 1, 1, 1, 0))),
            (),
        ),
        "many names": (replace(SAVED, saved=names), ()),
        "unmatched": (unmatched, ()),
        "unmatched, which the lint says": (unmatched, ("unmatched-name",)),
        "more than its share, which the lint says": (SAVED, ("more-than-its-share",)),
        "gathered": (replace(bare, gathered_forward_bytes=GIB, gathered_backward_bytes=2 * GIB), ()),
    }
    said = []
    for name, (saved, rules) in steps.items():
        findings = tuple(Finding(rule, "", "", 0, "") for rule in rules)
        row = step(executed_flops=1400, recompute_overhead_percent=40.0, kept=saved, findings=findings)
        said += [f"{name}: {sentence}" for sentence in saved_sentences([row])]
    row = step(executed_flops=1400, kept=SAVED)
    said += saved_sentences([row, replace(row, policy="nothing"), replace(row, policy="nothing", batch=16)])
    assert "\n".join(said) == snapshot
    assert saved_sentences([step()]) == []


def test_a_sweep(snapshot):
    def line(policy: str, outcome: Any, *records: Record, seq_len: int | None = None) -> Line:
        trial = SweepTrial("key", "gpt2", policy, "h100-80gb", 8, None, {}, seq_len=seq_len)
        return Line(trial, outcome, records)

    loop, unrolled = (step(LONG, layout=layout, requested_policy="auto") for layout in ("loop", "unrolled"))
    lines = [
        line("auto", "ok", unrolled),
        line("dots", "infeasible", step("dots", layout="loop", fits=False)),
        line("none", "oom", step("none", layout="loop", error="RESOURCE_EXHAUSTED: x", error_kind="oom")),
        line("nothing", "crashed", record(8)),
        line("auto", "ok", loop),
    ]
    of_lengths = [line("dots", "ok", step("dots", layout="loop"), seq_len=length) for length in (512, 1024)]
    assert snapshot == Paper().show(sweep_table(lines), *failure_sentences(lines), sweep_table(of_lengths))


def test_the_doctor_and_the_watch(snapshot):
    rows = [
        Row("python", "ok", "3.11 on Linux"),
        Row("GPU 0", "problem", f"[red] {'much of its memory is used, ' * 5}", "kill 42"),
        Row("environment", "note", "a variable", "unset IT"),
    ]
    processes = (GpuProcess(42, "python", 4 * GIB), GpuProcess(43, "?", None), GpuProcess(44, "server", 8 * GIB))
    gpu = Gpu(0, "NVIDIA H200", 140 * GIB, 12 * GIB, 128 * GIB, (9, 0), 35, processes)
    reading, peaks = Reading("580.1", "13.0", (gpu, replace(gpu, index=1, busy_percent=None, processes=()))), {0: 13 * GIB}
    paper = Paper()
    paper.console.print(doctor.doctor_table(rows))
    sentences = [*doctor.remedies(rows), doctor.verdict(rows), doctor.verdict(rows[:1]), doctor.verdict(rows[1:2] * 2)]
    sentences += [doctor.peak_sentence(peaks, 1, 0.0), doctor.peak_sentence(peaks | {1: GIB}, 1200, 60.0)]
    line = doctor.gpu_line(gpu, 13 * GIB, 0.0)
    assert snapshot == paper.show(*sentences, doctor.gpu_table(reading, peaks | {1: GIB}), line[len("00:00:00 ") :])


def test_a_training(snapshot, monkeypatch):
    """One that begins, one that is resumed, and one that was done before."""
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    paper = Paper()
    printer = TrainingPrinter(paper.report, Progress(paper.console), 40)
    for done in (0, 20, 40):
        printer.began(done, "" if done else "abc")
    for number in (1, 2, 3, 20, 40):
        evaluated = 2.5 if number == 20 else None
        metrics = StepMetrics(number, None if number == 3 else 2.0, 61_200.0 if number > 1 else None, 1.0, 956.0, evaluated)
        printer.step(metrics, float("nan") if number == 3 else 2.0, 200.0)
    printer.ended(40, measured(), "the")
    assert snapshot == paper.show(wraps=False)


@pytest.mark.parametrize(
    ("line", "mesh"),
    [
        ("--model tiny --policy dots+attention --batch 8 --global-batch 64 --grad-dtype bfloat16 --clip-norm 1", None),
        ("--model tiny --policy offload:mlpwi_0 --mesh fsdp=2", MeshShape(fsdp=2)),
        ("--model examples/plain_scan.py:workload --policy every:2 --batch 4", None),
    ],
    ids=["preset", "mesh", "own"],
)
def test_a_heading(line, mesh, h100, snapshot, monkeypatch):
    monkeypatch.setattr("jaxremat.model.attention._refusal", lambda *_: "")  # which compiles
    target: Target = load_target("h100-80gb", mesh) if mesh else h100
    heading = Session.of(check_run(parse_flags(RunFlags, line.split())), target).heading
    assert "\n".join(heading).replace(f"{Path.cwd()}/", "") == snapshot


@pytest.mark.full
def test_the_page(tmp_path, snapshot):
    """All that is written on it: over its views, folded and unfolded, and of a buffer that was found."""
    if why := missing_piece():
        pytest.skip(why)
    dots, nothing = scanned(num_layers=2), scanned(saved=False, num_layers=2)
    first = PageInput("gpt2", "dots", 32, "h100-80gb", dots, 6 * GIB, {"jax": "0.10.2"}, "python -m jaxremat explain")
    first = replace(first, savings=[Saving(dots.buffers[-1].name, GIB, 1e-3)])
    write_page(tmp_path / "page.html", [first, replace(first, policy="nothing", memory=nothing, savings=None)], redact=True)
    started = start_browser()
    try:
        page = Shown(started, tmp_path / "page.html")
        said = [page.text("body")]
        page.find("#about summary").click()
        page.search("gelu")
        page.find("#next").click()
        said += [page.text(f"#{name}") for name in ("found", "pinned", "loops", "about")]
        page.search("no such buffer")
        said += [page.text("#found")]
        for tab, num_lines in (("peak", 5), ("compare", None)):
            page.find(f"#tab-{tab}").click()
            said += page.text(f"#{tab}").splitlines()[:num_lines]
    finally:
        started.quit()
    assert "\n\n".join(said) == snapshot

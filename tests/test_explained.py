"""The command of `explain` that `run` names for its best step: it can be typed, and means that step."""

import io
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from jaxremat.cli.command import parse_flags
from jaxremat.cli.explain import ExplainFlags
from jaxremat.cli.explained import explain_flags, lint_line
from jaxremat.report.printer import Printer, Report
from jaxremat.session.flags import RunFlags
from tests.made_up_records import GIB, step

pytestmark = pytest.mark.any_jax
WORDS = """--model tiny --policy dots none --batch 8,16 --budget 11.02GiB --seq-len 64 --xla-remat --scan-layers False 
    --num-layers 4 --layers 'blocks_*' 'more' --target h200 --json --out a.jsonl --code --fresh"""


def typed(text: str) -> tuple[RunFlags, ExplainFlags]:
    """The flags of a run, and those of the command that it names for a step of batch 16."""
    flags = parse_flags(RunFlags, shlex.split(text))
    row = step("none", 16, seq_len=64, mesh="fsdp=4", layout="unrolled", requested_policy=flags.policy[-1])
    command, words = lint_line(flags, row).partition(": ")[2].partition(" explain ")[::2]
    assert command == "jaxremat"
    assert "--budget" not in text or "--budget 11.02GiB " in words
    found = parse_flags(ExplainFlags, shlex.split(words), "explain")
    assert found == explain_flags(flags, row)
    return flags, found


def test_the_command_has_the_flags_of_the_run():
    flags, found = typed(WORDS)
    assert (found.policy, found.batch, found.lint, found.json, found.out, found.fresh) == (
        ("none",),
        (16,),
        True,
        False,
        None,
        False,
    )
    for name in ("model", "budget", "training", "xla_remat", "fields", "layers", "target"):
        assert getattr(found, name) == getattr(flags, name) != getattr(ExplainFlags(), name)


def test_what_a_plan_chose_is_in_the_command():
    _, found = typed("--policy auto --mesh auto --devices 4 --seq-len 32,64 --xla-preset default latency-hiding")
    assert (found.mesh, found.devices, found.training.seq_len, found.training.loss) == ("fsdp=4", None, (64,), "full")
    assert (found.fields.scan_layers, found.xla_preset) == (False, ("default",))
    _, found = typed("--policy none --mesh fsdp=2 --devices 4")
    assert (found.mesh, found.devices, found.training.loss, found.fields.scan_layers) == ("fsdp=2", 4, None, None)


def test_there_is_no_command_without_much_to_gain():
    flags, row = RunFlags(), step()
    assert lint_line(flags, row)
    assert lint_line(flags, None) == lint_line(flags, replace(row, temp_bytes=GIB)) == ""
    assert lint_line(replace(flags, distributed=True), row) == ""


def test_a_plan_for_another_machine_has_all_findings_and_no_command():
    row = step("save:mlp_out", requested_policy="auto")
    elsewhere, here = (replace(row, config=row.config | {"target": {"kind": kind}}) for kind in ("deviceless", "attached"))
    assert lint_line(RunFlags(), elsewhere) == ""
    assert lint_line(RunFlags(), here)


def test_a_plan_s_file_is_named_by_the_command():
    assert "--policy plan:plan.json" in lint_line(RunFlags(), step("save:mlp_out", requested_policy="plan:plan.json"))


def test_the_command_is_of_the_fastest_step_that_fits():
    printer = Printer(Report(Console(file=io.StringIO())))
    assert printer.fastest() is None
    for row in (step("none", fits=False, step_s=0.001), step("dots", step_s=0.02), step("nothing", step_s=0.01)):
        printer.turn_to(len(printer.answers))
        printer.row(row)
        printer.policy_done()
    fastest = printer.fastest()
    assert fastest
    assert fastest.policy == "nothing"

"""A trial is measured in a fresh process, after another has compiled it: an attached GPU's path, here on the CPU."""

import json
import shlex
import sys
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest

from jaxremat.chips.target import load_target
from jaxremat.cli.command import parse_flags
from jaxremat.cli.processes import task_of
from jaxremat.cli.run import main
from jaxremat.cli.worker import as_flags
from jaxremat.session.flags import RunFlags
from jaxremat.trial.lines import from_row
from jaxremat.trial.queue import SweepTrial, run_trial
from jaxremat.trial.record import LargestBatchRecord, TrialRecord
from jaxremat.trial.task import Result, Task, read_task
from jaxremat.trial.workers import Workers
from tests.made_up_records import search, trial

SMALL = shlex.split("--model tiny --num-layers 1 --dropout 0 --target cpu --steps 2")


class Watched(Workers):
    """Workers whose results are in `ended`. A process that measures has a second where no device is timed."""

    def __init__(self, command, environment=None):
        super().__init__(command, environment)
        self.ended = list[Result]()

    def start(self, task: Task, *, timeout_s: float, cache: bool = False):
        return super().start(task, timeout_s=1.0 if task.measure and not cache else timeout_s, cache=cache)

    def wait(self, at_most_s: float):
        found = super().wait(at_most_s)
        self.ended += [result for _, result in found]
        return found


def test_flags_survive_the_way_to_a_process(tmp_path):
    """Written to a task's file and read back they are equal, of every type; what is the parent's alone is left out."""
    some = "--mem-fraction 0.5 --xla-remat --data x.txt --learning-rate 0.1 --scan-layers False --global-batch 8"
    own = "--objective batch --offload --max-batch 9 --out rows.jsonl --save-plan plan.json"
    flags = parse_flags(RunFlags, [*SMALL, *some.split(), *own.split()])
    for policy, batch in (("auto", None), ("dots", 2)):
        both = replace(flags, fields=replace(flags.fields, scan_layers="auto"))
        sent = as_flags(msgspec.json.decode(task_of(both, policy, batch, "default").to_json())["flags"])
        assert sent.fields.scan_layers == ("auto" if policy == "auto" else None)
        path = tmp_path / policy
        path.write_text(task_of(flags, policy, batch, "jax-toolbox").to_json())
        read = as_flags(read_task(path).flags)
        planned = {"objective": flags.objective, "offload": flags.offload} if policy == "auto" else {}
        words = {"policy": (policy,), "batch": (batch,) if batch else (), "xla_preset": ("jax-toolbox",)}
        expected = replace(flags, **{"objective": "time", "offload": False} | planned, **words, out=None, save_plan=None)
        assert read == expected


@pytest.mark.full
def test_a_run_compiles_in_one_process_and_measures_in_another_from_its_cache(monkeypatch, capsys, tmp_path):
    """The CPU passed off as an attached device to `run` itself, which then only asks it what it is."""
    attached = replace(load_target("cpu"), kind="attached", memory_bytes=2**33)
    workers = list[Watched]()

    def watched(*given: Any) -> Watched:
        workers.append(Watched(*given))
        return workers[-1]

    monkeypatch.setattr("jaxremat.chips.target.load_target", lambda name, mesh=None: attached)
    monkeypatch.setattr("jaxremat.trial.trials.Trials.compile", lambda *_: pytest.fail("compiled in this process"))
    monkeypatch.setattr("jaxremat.cli.processes.Workers", watched)
    out = tmp_path / "rows.jsonl"
    assert main([*SMALL, "--policy", "none", "--batch", "1", "--out", str(out)]) == 0
    assert capsys.readouterr().out
    (row,) = (from_row(json.loads(line)) for line in out.read_text().splitlines())
    (compiled, measured) = (result.records[0] for of_command in workers for result in of_command.ended)
    assert isinstance(compiled, TrialRecord)
    assert isinstance(measured, TrialRecord)
    assert isinstance(row, TrialRecord)
    assert (row.step_source, measured.step_source, row.error) == ("measured", "measured", None)
    assert (row.target, row.batch) == ("cpu", 1)
    assert row.step_s == measured.step_s
    assert measured.step_s
    for name in ("total_bytes", "executed_flops", "config", "versions", "policy", "global_batch"):
        assert getattr(compiled, name) == getattr(measured, name) == getattr(row, name)
    assert compiled.compile_s
    assert measured.compile_s
    assert row.compile_s == compiled.compile_s > 2 * measured.compile_s, "the second was read from the cache"


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("print('RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes'); sys.exit(1)", "oom"),
        ("time.sleep(1000)", "timeout"),
        ("os.abort()", "crashed"),
    ],
)
def test_a_measurement_that_fails_is_its_row(text, kind):
    """The compiled bytes stay; the error and its class stand beside them, and the search has no time."""
    found = search(largest_batch=4, next_batch=None, step_s=1.0, step_source="predicted")
    compiled = trial(4, total_bytes=5, step_s=1.0)
    result = asdict(Result(outcome="ok", records=(compiled, found), to_measure=(0,)))
    flags = {"first": f"open(result, 'w').write({json.dumps(result)!r})", "then": text}
    program = (
        "import json, os, sys, time\ntask, result = sys.argv[1:]\ntask = json.load(open(task))\n"
        "exec(task['flags']['then' if task['measure'] else 'first'])"
    )
    with (workers := Watched([sys.executable, "-c", program])):
        row, found = run_trial(
            SweepTrial("key", "tiny", "dots", "gpu", None, Task(flags), {}), workers, 60, lambda line: None
        )
    assert isinstance(row, TrialRecord)
    assert isinstance(found, LargestBatchRecord)
    assert (row.total_bytes, row.error_kind, row.step_s) == (5, kind, None)
    assert row.error
    assert found.step_s is found.step_source is None

"""Several lengths in one command: the requests, the records of `jaxremat.run`, a sweep's trials, and what is rejected.

The models are of a few thousand parameters. Two real runs are made: at two lengths on a mesh, and of a data set in buckets.
"""

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxremat.cli.command import parse_flags
from jaxremat.cli.explain import ExplainFlags, check_explain
from jaxremat.cli.grid import sweep_trials
from jaxremat.cli.output import show_heading
from jaxremat.cli.run import main
from jaxremat.errors import UsageError
from jaxremat.policy.grammar import parse
from jaxremat.report.printer import Printer, Report
from jaxremat.search.batch import FIRST_BATCH
from jaxremat.search.buckets import Bucket, Bucketed
from jaxremat.search.histogram import Histogram
from jaxremat.session.flags import RunFlags, SweepFlags
from jaxremat.session.lengths import MAX_BUCKETS, at_each_length, check_lengths, first_batch
from jaxremat.session.request import MAXTEXT, Auto, Request, RequestedPolicy
from jaxremat.session.session import Session
from jaxremat.trial.bucketed import lengths_record
from jaxremat.trial.comparisons import LengthsRecord
from jaxremat.trial.lines import from_row, to_json
from jaxremat.trial.ranks import rank_records
from jaxremat.trial.record import TrialRecord
from tests.made_up_records import GIB, measured, step, trial

SMALL = "--model tiny --num-layers 1 --dropout 0 --attention xla --target h100-80gb --policy none"
OWN = (
    "--model examples/plain_scan.py:workload --model-arg num_layers=2 width=32 num_heads=2 vocab_size=64 chunk=32 "
    "--target h100-80gb --policy nothing --batch 2"
)


def request(line: str) -> Request[RunFlags]:
    return check_lengths(parse_flags(RunFlags, line.split()))


def rejected(line: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        request(line)
    return caught.value


def records(out: str) -> Iterator[Any]:
    return (from_row(json.loads(line)) for line in out.splitlines())


class TestRequests:
    def test_each_length_is_a_request_of_its_own(self):
        requested = request(f"{SMALL} --seq-len 32,64 --seq-len 128 32")
        assert requested.lengths == (32, 64, 128)
        each = at_each_length(requested)
        assert [one.train.seq_len for one in each] == [32, 64, 128]
        assert {one.lengths for one in each} == {()}
        assert [dataclasses.replace(one, train=each[0].train, flags=each[0].flags) for one in each] == [each[0]] * 3

    def test_one_length_is_the_request_itself(self):
        requested = request(f"{SMALL} --seq-len 32")
        assert (requested.lengths, requested.train.seq_len, at_each_length(requested)) == ((), 32, (requested,))

    def test_a_length_beyond_the_learned_positions_is_rejected_before_anything_is_compiled(self):
        error = rejected("--model tiny --seq-len 64,129")
        assert "--seq-len got 129" in error.got
        assert "128" in error.allowed

    @pytest.mark.parametrize(
        ("flags", "what"),
        [
            ("--list names", "--list names"),
            ("--frontier --batch 4", "--frontier"),
            ("--policy auto --save-plan plan.json", "--save-plan"),
        ],
    )
    def test_what_is_about_one_length_is_rejected(self, flags, what):
        error = rejected(f"--model tiny --seq-len 64,32 {flags}")
        assert what in error.got
        assert request(f"--model tiny {error.next_step} --batch 4").train.seq_len == 64

    def test_a_command_of_one_length_rejects_several(self):
        with pytest.raises(UsageError) as caught:
            check_explain(parse_flags(ExplainFlags, ["--model", "tiny", "--seq-len", "32,64"]))
        assert "--seq-len" in caught.value.got

    def test_a_workload_of_ones_own_takes_the_length(self, h100):
        """Its function has a keyword `seq_len`."""
        for one, length in zip(at_each_length(request(f"{OWN} --seq-len 32,64")), (32, 64), strict=True):
            started = Session.of(one, h100)
            assert started.trials.factory.facts(started.trials.train).seq_len == length
            assert started.trials.factory.config()["arguments"]["seq_len"] == str(length)
            assert started.trials.workload_at(2).num_tokens == 2 * length

    def test_a_workload_without_a_length_is_rejected(self, tmp_path, h100):
        path = tmp_path / "of_one_length.py"
        path.write_text("import jaxremat\n\ndef workload(batch: int = 8):\n    return None\n")
        with pytest.raises(UsageError) as caught:
            Session.of(request(f"--model {path}:workload --seq-len 32"), h100)
        assert "32" in caught.value.got
        assert "of_one_length.py:workload" in caught.value.got
        with pytest.raises(UsageError) as caught:
            Session.of(request(f"{OWN} --seq-len 32 --model-arg seq_len=8"), h100)
        assert "--seq-len" in caught.value.got
        assert "--model-arg" in caught.value.got


class TestSweep:
    def swept(self, line):
        return sweep_trials(parse_flags(SweepFlags, ["--out", "rows.jsonl", *line.split()]))

    def test_a_trial_for_each_length(self):
        found = self.swept(f"{SMALL} --seq-len 32,64 --policy dots --batch 2")
        assert [str(one) for one in found] == [
            f"tiny, sequence {length}, {policy}, batch 2, h100-80gb" for length in (32, 64) for policy in ("none", "dots")
        ]
        assert len({one.key for one in found}) == 4
        assert [one.task and one.task.flags["training"]["seq_len"] for one in found] == [(32,)] * 2 + [(64,)] * 2

    def test_one_length_is_the_trial_that_it_was(self):
        one, two = self.swept(f"{SMALL} --seq-len 32"), self.swept(f"{SMALL} --seq-len 32,64")
        assert one[0].key == two[0].key
        assert str(one[0]) == "tiny, none, largest batch, h100-80gb"

    def test_a_length_that_no_model_takes_is_rejected(self):
        with pytest.raises(UsageError) as caught:
            self.swept("--model tiny --seq-len 64,129")
        assert "--seq-len got 129" in caught.value.got
        found = self.swept("--model tiny llama3-8b --seq-len 64,129")
        assert [one.task is None for one in found] == [False, True, False, False]


@pytest.mark.full
def test_lengths_on_a_mesh(h100, capsys):
    """The members of `tensor` share their sequences: two members with 8 sequences each are 4 devices."""
    assert main(f"{SMALL} --seq-len 64,128 --batch 8 --mesh fsdp=2,tensor=2 --json".split()) == 0
    short, long = records(capsys.readouterr().out)
    assert (short.seq_len, long.seq_len, long.mesh) == (64, 128, "fsdp=2,tensor=2")
    assert long.total_bytes > short.total_bytes
    for row in (short, long):
        assert row.tokens_per_s == pytest.approx(2 * 8 * row.seq_len / 4 / row.step_s)


def test_the_heading_is_not_repeated(h100):
    out, before = io.StringIO(), list[Session]()
    for one in at_each_length(request(f"{SMALL} --seq-len 64,128 --batch 4")):
        before.append(Session.of(one, h100))
        show_heading(before[-1], Report(Console(file=out, width=1000)), before=before[:-1])
    printed = [line.rstrip() for line in out.getvalue().splitlines() if line]
    assert len(printed) == len(set(printed)) == len(before[0].heading) + 1
    assert set(printed) == {line for one in before for line in one.heading}


class TestPrinter:
    def printed(self, *rows: TrialRecord) -> Printer:
        printer = Printer(Report(Console(file=io.StringIO())))
        for row in rows:
            printer.row(row)
            printer.policy_done()
        printer.all_done("h100-80gb")
        return printer

    def test_a_length_at_which_nothing_fits_is_no_failure(self):
        rows = [step("dots", seq_len=8192), step("dots", seq_len=131072, fits=False)]
        printer = self.printed(*rows)
        assert (printer.exit_code(), printer.no_fit()) == (0, None)

    def test_nothing_that_fits_at_any_length(self):
        rows = [step("dots", seq_len=length, fits=False, total_bytes=length * GIB) for length in (64, 128)]
        printer = self.printed(*rows)
        assert (printer.exit_code(), printer.no_fit()) == (3, rows[0])

    def test_policies_are_ranked_within_a_length(self):
        speeds = {"a": 1.0, "b": 2.0, "c": 3.0}
        rows = [
            measured(policy, 1, seconds * length, seconds, seq_len=length)
            for length in (64, 128)
            for policy, seconds in speeds.items()
        ]
        assert [found.spearman for found in rank_records(rows)] == [pytest.approx(1)] * 2


DATA = "# tokens, sequences\n20\n30,40\n64 8\n"


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text(DATA)
    return path


class TestBucketRequests:
    def test_a_bucket_is_planned_at_its_boundary(self, data):
        requested = request(f"--model tiny --lengths {data} --buckets 2 --mesh fsdp=4")
        assert requested.bucketed
        assert (requested.lengths, requested.bucketed.num_cut, requested.bucketed.histogram.num_sequences) == (
            (32, 64),
            0,
            49,
        )
        for one, bucket in zip(at_each_length(requested), requested.bucketed.buckets, strict=True):
            assert one.mesh
            assert (one.train.seq_len, one.mesh.num_devices) == (bucket.seq_len, 4)
            assert [isinstance(policy.policy, Auto) for policy in one.policies] == [True]
            assert (one.flags.lengths, one.flags.buckets, one.lengths) == (None, None, ())

    def test_a_named_policy_stays(self, data):
        requested = request(f"{SMALL} --lengths {data}")
        assert [[policy.text for policy in one.policies] for one in at_each_length(requested)] == [["none"]] * 3

    def test_a_seq_len_cuts_longer_sequences(self, data):
        requested = request(f"{SMALL} --lengths {data} --seq-len 36 --buckets 1")
        assert requested.bucketed
        assert (requested.lengths, requested.bucketed.num_cut, requested.bucketed.histogram.longest) == ((36,), 8, 36)

    def test_a_boundary_has_at_most_the_learned_positions(self, data):
        assert request(f"{SMALL} --max-seq-len 65 --lengths {data} --seq-len 100").lengths == (24, 32, 64)
        data.write_text("65,2")
        assert request(f"{SMALL} --max-seq-len 66 --lengths {data} --seq-len 100").lengths == (66,)

    def test_a_config_json(self, data):
        requested = request(f"--hf examples/configs/Qwen3-8B.json --lengths {data} --buckets 1")
        (one,) = at_each_length(requested)
        assert one.model == requested.model

    def test_a_text_of_maxtext_is_no_preset(self, data):
        """gpt2 has 1,024 positions and costs FLOPs. A text's sequences cost their tokens, however long they are."""
        data.write_text("100,3\n2000,1\n")
        requested = check_lengths(RunFlags(maxtext="model_name=x", lengths=data, buckets=2))
        assert requested.bucketed
        assert (requested.model.name, requested.bucketed.histogram.longest) == (MAXTEXT, 2000)
        assert [one.flags.model for one in at_each_length(requested)] == [MAXTEXT] * 2
        of_own = check_lengths(RunFlags(model="examples/plain_scan.py:workload", lengths=data, buckets=2))
        assert requested.lengths == of_own.lengths

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            ("--batch 4", "--batch"),
            ("--global-batch 64", "--global-batch"),
            ("--mesh auto --devices 8", "--mesh auto"),
            ("--seq-len 32,64", "--seq-len"),
            ("--buckets 0", "--buckets got 0"),
            ("--policy plan:plan.json", "--policy plan:FILE"),
            ("--max-seq-len 60", "64"),
            ("--frontier", "--frontier"),
            ("--list names", "--list names"),
            ("--objective memory", "--objective memory"),
        ],
    )
    def test_what_does_not_go_with_a_data_set(self, data, flags, named):
        error = rejected(f"--model tiny --lengths {data} {flags}")
        assert named in error.got
        assert error.next_step
        assert flags != "--buckets 0" or error.allowed == f"1 to {MAX_BUCKETS}"

    def test_buckets_of_nothing(self):
        assert "--buckets" in rejected("--buckets 2").got
        assert "--lengths '/no/such'" in rejected("--lengths /no/such").got


@pytest.mark.full
def test_a_data_set_in_buckets(h100, data, capsys):
    """The rates follow from the steps of the buckets, and are the same in the table and in the record."""
    path = data.with_suffix(".jsonl")
    line = f"{SMALL} --lengths {data} --buckets 2 --max-batch 4 --out {path}"
    assert main(line.split()) == 0
    shown = capsys.readouterr().out
    *rows, found = records(path.read_text())
    short, long = (row for row in rows if row.record == "trial")
    assert [(bucket.seq_len, bucket.batch, bucket.num_sequences) for bucket in found.buckets] == [(32, 4, 41), (64, 4, 8)]
    assert (found.num_sequences, found.num_tokens) == (49, 20 + 40 * 30 + 8 * 64)
    spent_s = 41 / 4 * short.step_s + 8 / 4 * long.step_s
    assert found.tokens_per_s == pytest.approx(found.num_tokens / spent_s)
    assert found.padded_tokens_per_s == pytest.approx(found.num_tokens / (49 / 4 * long.step_s))
    assert found.packed_share == pytest.approx(found.num_tokens / (29 * 64))  # 8 rows of one, 20 of two, 1 of the last
    assert found.packed_tokens_per_s == pytest.approx(found.packed_share * 4 * 64 / long.step_s)
    assert found.num_compiles == len({(row.seq_len, row.batch) for row in rows if isinstance(row, TrialRecord)})
    assert from_row(json.loads(to_json(found))) == found
    for rate in (found.tokens_per_s, found.padded_tokens_per_s, found.packed_tokens_per_s):
        assert f"{rate:,.0f}" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 80


class TestLengthsRecord:
    DATA = Bucketed(Histogram(((60, 3), (500, 1))), 1, (Bucket(64, 3, 180), Bucket(512, 1, 500)))

    def row(self, seq_len: int, policy: str, fits: bool, rate: float) -> TrialRecord:
        return step(policy, seq_len=seq_len, samples_per_s=rate, step_s=8 / rate, fits=fits)

    def found(self, *rows: TrialRecord) -> LengthsRecord:
        found = lengths_record(self.DATA, Path("some.txt"), rows, 5)
        assert found
        return found

    def test_each_bucket_takes_its_fastest_policy(self):
        rows = [self.row(64, "a", True, 100), self.row(64, "b", True, 90)]
        rows += [self.row(512, "a", True, 10), self.row(512, "b", True, 20), self.row(512, "c", False, 30)]
        found = self.found(*rows)
        assert [(bucket.policy, bucket.fits) for bucket in found.buckets] == [("a", True), ("b", True)]
        assert found.tokens_per_s == pytest.approx(680 / (3 / 100 + 1 / 20))
        assert found.padded_tokens_per_s == pytest.approx(680 / (4 / 20))
        assert found.packed_tokens_per_s == pytest.approx(20 * 680 / 2)  # two rows

    @pytest.mark.parametrize(("fits", "code"), [(True, 0), (False, 3)])
    def test_a_bucket_without_a_fit(self, fits, code):
        rows = [self.row(64, "dots", True, 100), self.row(512, "dots", fits, 10)]
        found = self.found(*rows)
        printer = Printer(Report(Console(file=io.StringIO())))
        for row in rows:
            printer.row(row)
            printer.policy_done()
        printer.all_done("h100-80gb", found)
        assert printer.exit_code() == code
        rates = (found.tokens_per_s, found.padded_tokens_per_s, found.packed_tokens_per_s)
        assert [rate is not None for rate in rates] == [fits] * 3

    def test_a_bucket_that_was_not_compiled(self):
        assert lengths_record(self.DATA, Path("some.txt"), [self.row(64, "a", True, 100)], 1) is None


def test_a_search_starts_at_as_many_tokens_as_the_length_before():
    requested = RequestedPolicy("dots", parse("dots"))
    before = dataclasses.replace(trial(100), seq_len=512)
    assert first_batch([before], requested, 2048) == 25
    assert first_batch([before], requested, 10**6) == 1
    assert first_batch([dataclasses.replace(before, fits=False)], requested, 2048) == FIRST_BATCH
    assert [first_batch([], requested, length) for length in (None, 1024, 2**14, 2**15, 10**6)] == [8, 8, 8, 4, 1]
    assert first_batch([before], RequestedPolicy("nothing", parse("nothing")), 2048) == FIRST_BATCH

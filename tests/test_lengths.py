"""Several lengths in one command: the requests, the table of `jaxremat.run`, a sweep's trials, and what is refused.

The models are of a few thousand parameters. Two real runs are made once, on one device and on a mesh.
"""

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from jaxremat.command import parse_flags
from jaxremat.errors import UsageError
from jaxremat.explain import main as explain
from jaxremat.flags import RunFlags, SweepFlags
from jaxremat.grid import trials_of
from jaxremat.lengths import at_each_length, check_lengths, first_batch
from jaxremat.policy.grammar import parse
from jaxremat.report.printer import Printer, Report
from jaxremat.request import Asked, Auto
from jaxremat.run import main
from jaxremat.search.batch import FIRST_BATCH
from jaxremat.search.buckets import Bucket, Bucketed
from jaxremat.search.histogram import Histogram
from jaxremat.trial.bucketed import lengths_record
from jaxremat.trial.details import PredictedStep
from jaxremat.trial.lines import from_row, to_json
from jaxremat.trial.ranks import rank_records
from jaxremat.trial.record import TrialRecord
from tests.made_up_records import trial

SMALL = "--model tiny --num-layers 1 --dropout 0 --target h100-80gb --policy nothing"
OWN = (
    "--model examples/plain_scan.py:workload --model-arg num_layers=2 width=32 num_heads=2 vocab_size=64 chunk=32 "
    "--target h100-80gb --policy nothing --batch 2"
)


def request(line):
    return check_lengths(parse_flags(RunFlags, line.split()))


def records(out):
    return [from_row(json.loads(line)) for line in out.splitlines()]


@pytest.mark.any_jax
class TestRequests:
    def test_each_length_is_a_request_of_its_own(self):
        asked = request(f"{SMALL} --seq-len 32,64 --seq-len 128 32")
        assert asked.lengths == (32, 64, 128)
        each = at_each_length(asked)
        assert [one.train.seq_len for one in each] == [32, 64, 128]
        assert {one.lengths for one in each} == {()}
        assert [dataclasses.replace(one, train=each[0].train, flags=each[0].flags) for one in each] == [each[0]] * 3

    def test_one_length_is_the_request_itself(self):
        asked = request(f"{SMALL} --seq-len 32")
        assert (asked.lengths, asked.train.seq_len, at_each_length(asked)) == ((), 32, (asked,))

    def test_a_length_beyond_the_learned_positions_is_refused_before_anything_is_compiled(self, refusal):
        said = refusal(["--model", "tiny", "--seq-len", "64,129"])
        assert said.startswith("--seq-len got 129. Allowed: up to tiny's 128 learned positions.")

    @pytest.mark.parametrize(
        ("flags", "what"),
        [
            ("--list names", "--list names"),
            ("--frontier --batch 4", "--frontier"),
            ("--policy auto --save-plan plan.json", "--save-plan"),
        ],
    )
    def test_what_is_about_one_length_is_refused(self, refusal, flags, what):
        said = refusal(f"--model tiny --seq-len 64,32 {flags}".split())
        assert said == f"{what} is about one length, and --seq-len asks for 2. Next: --seq-len 64."

    def test_a_command_of_one_length_refuses_several(self, capsys):
        assert explain(["--model", "tiny", "--seq-len", "32,64"]) == 2
        assert "--seq-len asks for 2 lengths, and this command takes one." in capsys.readouterr().err


@pytest.mark.any_jax
class TestSweep:
    def swept(self, line):
        return trials_of(parse_flags(SweepFlags, ["--out", "rows.jsonl", *line.split()]))

    def test_a_trial_for_each_length(self):
        found = self.swept(f"{SMALL} --seq-len 32,64 --policy dots --batch 2")
        assert [str(one) for one in found] == [
            f"tiny, sequence {length}, {policy}, batch 2, h100-80gb" for length in (32, 64) for policy in ("nothing", "dots")
        ]
        assert len({one.key for one in found}) == 4
        assert [one.task.flags["training"]["seq_len"] for one in found] == [(("32",),)] * 2 + [(("64",),)] * 2

    def test_one_length_is_the_trial_that_it_was(self):
        one, two = self.swept(f"{SMALL} --seq-len 32"), self.swept(f"{SMALL} --seq-len 32,64")
        assert one[0].key == two[0].key
        assert str(one[0]) == "tiny, nothing, largest batch, h100-80gb"

    def test_a_length_that_no_model_takes_is_refused(self):
        with pytest.raises(UsageError, match="--seq-len got 129"):
            self.swept("--model tiny --seq-len 64,129")
        found = self.swept("--model tiny llama3-8b --seq-len 64,129")
        assert [one.task is None for one in found] == [False, True, False, False]


@pytest.fixture(scope="module")
def printed(h100, tmp_path_factory) -> tuple[str, list]:
    """What a run at two lengths prints, and its records."""
    path = tmp_path_factory.mktemp("lengths") / "rows.jsonl"
    console = io.StringIO()
    with contextlib.redirect_stdout(console):
        assert main([*SMALL.split(), "--seq-len", "64,128", "--batch", "4", "--out", str(path)]) == 0
    return console.getvalue(), records(path.read_text())


def test_each_length_has_a_row_with_its_own_tokens(printed):
    out, (short, long) = printed
    assert (short.seq_len, long.seq_len) == (64, 128)
    assert long.total_bytes > short.total_bytes
    for row in (short, long):
        assert row.tokens_per_s == pytest.approx(4 * row.seq_len / row.step_s)
    table = out[out.index("lengths side by side") :].splitlines()
    assert [line.split()[:3] for line in table if "nothing" in line] == [["64", "nothing", "4"], ["128", "nothing", "4"]]


def test_the_heading_is_not_repeated(printed):
    out, _ = printed
    for begins in ("model  ", "target  ", "attention cudnn: ", "budget  "):
        assert len(re.findall(f"^{begins}", out, re.MULTILINE)) == 1
    assert re.findall(r"^step +sequence (\d+)", out, re.MULTILINE) == ["64", "128"]


@pytest.mark.any_jax
def test_lengths_on_a_mesh(h100, capsys):
    """The members of `tensor` share their sequences: two members with 8 sequences each are 4 devices."""
    line = (
        "--model tiny --num-layers 1 --policy nothing --target h100-80gb --seq-len 64,128 --batch 8 --mesh fsdp=2,tensor=2"
    )
    assert main([*line.split(), "--json"]) == 0
    short, long = records(capsys.readouterr().out)
    assert (short.seq_len, long.seq_len, long.mesh) == (64, 128, "fsdp=2,tensor=2")
    for row in (short, long):
        assert row.tokens_per_s == pytest.approx(2 * 8 * row.seq_len / 4 / row.step_s)


@pytest.mark.any_jax
def test_a_workload_of_ones_own_takes_the_length(h100, capsys):
    """Its function has a keyword `seq_len`."""
    assert main([*OWN.split(), "--seq-len", "32,64", "--json"]) == 0
    short, long = records(capsys.readouterr().out)
    assert (short.seq_len, long.seq_len) == (32, 64)
    assert (short.config["model"]["arguments"]["seq_len"], long.config["model"]["arguments"]["seq_len"]) == ("32", "64")
    assert long.tokens_per_s == pytest.approx(2 * 64 / long.step_s)


@pytest.mark.any_jax
def test_a_workload_without_a_length_is_refused(refusal, tmp_path):
    (tmp_path / "of_one_length.py").write_text("import jaxremat\n\ndef workload(batch: int = 8):\n    return None\n")
    said = refusal(["--model", f"{tmp_path}/of_one_length.py:workload", "--target", "cpu", "--seq-len", "32"])
    assert said.startswith("sequences of 32 tokens were asked for, and of_one_length.py:workload takes no length.")
    twice = refusal([*OWN.split(), "--seq-len", "32", "--model-arg", "seq_len=8"])
    assert twice.startswith("--seq-len and --model-arg seq_len were both given.")


def step_time(seconds: float) -> PredictedStep:
    return PredictedStep(seconds, *[0.0] * 5, *[0] * 5)


@pytest.mark.any_jax
class TestPrinter:
    def shown(self, capsys, *rows):
        printer = Printer(Report(Console(width=80)))
        for row in rows:
            printer.row(row)
            printer.policy_done()
        printer.all_done("h100-80gb")
        return printer, capsys.readouterr().out

    def row(self, seq_len, policy, fits, total):
        of = dict(seq_len=seq_len, policy=policy, requested_policy=policy, total_bytes=total, budget_bytes=2**31)
        return dataclasses.replace(trial(1, fits=fits), limit_bytes=None, step_s=0.1, step_source="predicted", **of)

    def test_a_length_at_which_nothing_fits_says_what_it_needs(self, capsys):
        rows = [
            self.row(8192, "dots", True, 2**30),
            self.row(131072, "dots", False, 5 * 2**30),
            self.row(131072, "nothing", False, 3 * 2**30),
        ]
        printer, out = self.shown(capsys, *rows)
        assert "At 131,072 tokens nothing fits: nothing at batch 1 needs 3.00 GiB of 2.00 GiB." in out
        assert "At 8,192" not in out
        assert max(map(len, out.splitlines())) <= 80
        assert (printer.exit_code(), printer.misfit()) == (0, None)

    def test_nothing_that_fits_at_any_length(self, capsys):
        printer, _ = self.shown(capsys, self.row(64, "dots", False, 2**32), self.row(128, "dots", False, 2**33))
        assert printer.exit_code() == 3
        assert printer.misfit().seq_len == 64

    def test_policies_are_ranked_within_a_length(self):
        speeds = {"a": 1.0, "b": 2.0, "c": 3.0}
        rows = [
            dataclasses.replace(
                self.row(length, policy, True, 1),
                step_s=seconds * length,
                step_source="measured",
                predicted=step_time(seconds),
            )
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


@pytest.mark.any_jax
class TestBucketRequests:
    def test_a_bucket_is_planned_at_its_boundary(self, data):
        asked = request(f"--model tiny --lengths {data} --buckets 2 --mesh fsdp=4")
        assert (asked.lengths, asked.bucketed.num_cut, asked.bucketed.histogram.num_sequences) == ((32, 64), 0, 49)
        for one, bucket in zip(at_each_length(asked), asked.bucketed.buckets, strict=True):
            assert (one.train.seq_len, one.mesh.num_devices) == (bucket.seq_len, 4)
            assert [isinstance(policy.policy, Auto) for policy in one.policies] == [True]
            assert (one.flags.lengths, one.flags.buckets, one.lengths) == (None, None, ())

    def test_a_named_policy_stays(self, data):
        asked = request(f"{SMALL} --lengths {data}")
        assert [[policy.text for policy in one.policies] for one in at_each_length(asked)] == [["nothing"]] * 3

    def test_a_seq_len_cuts_longer_sequences(self, data):
        asked = request(f"{SMALL} --lengths {data} --seq-len 36 --buckets 1")
        assert (asked.lengths, asked.bucketed.num_cut, asked.bucketed.histogram.longest) == ((36,), 8, 36)

    def test_a_boundary_has_at_most_the_learned_positions(self, data):
        assert request(f"{SMALL} --max-seq-len 65 --lengths {data} --seq-len 100").lengths == (24, 32, 64)
        data.write_text("65,2")
        assert request(f"{SMALL} --max-seq-len 66 --lengths {data} --seq-len 100").lengths == (66,)

    def test_a_config_json(self, data):
        asked = request(f"--hf examples/configs/Qwen3-8B.json --lengths {data} --buckets 1")
        assert [one.model.name for one in at_each_length(asked)] == [asked.model.name]

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ("--batch 4", "--batch and --lengths were both given."),
            ("--global-batch 64", "--global-batch and --lengths were both given."),
            ("--seq-len 32,64", "--seq-len asks for 2 lengths beside --lengths."),
            ("--buckets 0", "--buckets got 0. Allowed: 1 to 64."),
            ("--policy plan:plan.json", "--policy plan:FILE and --lengths were both given."),
            (
                "--max-seq-len 60",
                "--lengths has sequences of up to 64 tokens. Allowed: up to the model's 60 learned positions.",
            ),
            ("--frontier", "--frontier is about one length, and --lengths has buckets of several."),
            ("--list names", "--list names is about one length, and --lengths has buckets of several."),
            ("--objective memory", "--objective memory needs a --batch"),
        ],
    )
    def test_what_does_not_go_with_a_data_set(self, refusal, data, flags, said):
        assert refusal(["--model", "tiny", "--lengths", str(data), *flags.split()]).startswith(said)

    def test_buckets_of_nothing(self, refusal):
        assert refusal(["--buckets", "2"]).startswith("--buckets divides the sequences of --lengths, which wasn't given.")
        assert refusal(["--lengths", "/no/such"]).startswith("--lengths '/no/such' cannot be read: No such file")


@pytest.mark.any_jax
def test_a_data_set_in_buckets(h100, data, capsys):
    """The rates follow from the steps of the buckets, and are the same in the table and in the record."""
    path = data.with_suffix(".jsonl")
    line = f"{SMALL} --lengths {data} --buckets 2 --max-batch 4 --out {path}"
    assert main(line.split()) == 0
    out = capsys.readouterr().out
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
    table = out[out.index("buckets within") :]
    assert "policy nothing" in table.splitlines()[0]
    for rate in (found.tokens_per_s, found.padded_tokens_per_s, found.packed_tokens_per_s):
        assert f"{rate:,.0f}" in table
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.any_jax
class TestLengthsRecord:
    DATA = Bucketed(Histogram(((60, 3), (500, 1))), 1, (Bucket(64, 3, 180), Bucket(512, 1, 500)))

    def row(self, seq_len, policy, fits, rate):
        of = dict(requested_policy=policy, policy=policy, seq_len=seq_len, samples_per_s=rate, step_s=8 / rate)
        return dataclasses.replace(trial(8, fits=fits), limit_bytes=None, step_source="predicted", **of)

    def shown(self, rows, capsys):
        found = lengths_record(self.DATA, Path("some.txt"), rows, 5)
        printer = Printer(Report(Console(width=80)))
        for row in rows:
            printer.row(row)
            printer.policy_done()
        printer.all_done("h100-80gb", found)
        return found, printer.exit_code(), capsys.readouterr().out

    def test_each_bucket_takes_its_fastest_policy(self, capsys):
        rows = [self.row(64, "a", True, 100), self.row(64, "b", True, 90)]
        rows += [self.row(512, "a", True, 10), self.row(512, "b", True, 20), self.row(512, "c", False, 30)]
        found, code, out = self.shown(rows, capsys)
        assert [(bucket.policy, bucket.fits) for bucket in found.buckets] == [("a", True), ("b", True)]
        assert found.tokens_per_s == pytest.approx(680 / (3 / 100 + 1 / 20))
        assert found.padded_tokens_per_s == pytest.approx(680 / (4 / 20))
        assert found.packed_tokens_per_s == pytest.approx(20 * 680 / 2)  # two rows
        assert code == 0
        assert "4 sequences of 170 tokens on average, 1 of them cut to 512; 5 compiles." in out

    def test_a_bucket_without_a_fit(self, capsys):
        found, code, out = self.shown([self.row(64, "a", True, 100), self.row(512, "a", False, 10)], capsys)
        assert (found.tokens_per_s, found.padded_tokens_per_s, found.packed_tokens_per_s, code) == (None, None, None, 3)
        assert "Up to 512 tokens nothing fits: a at batch 8 needs" in out

    def test_a_bucket_that_was_not_compiled(self, capsys):
        assert lengths_record(self.DATA, Path("some.txt"), [self.row(64, "a", True, 100)], 1) is None


@pytest.mark.any_jax
def test_a_search_starts_at_as_many_tokens_as_the_length_before():
    asked = Asked("dots", parse("dots"))
    before = dataclasses.replace(trial(100), seq_len=512)
    assert first_batch([before], asked, 2048) == 25
    assert first_batch([before], asked, 10**6) == 1
    assert first_batch([dataclasses.replace(before, fits=False)], asked, 2048) == FIRST_BATCH
    assert [first_batch([], asked, length) for length in (None, 1024, 2**14, 2**15, 10**6)] == [8, 8, 8, 4, 1]
    assert first_batch([before], Asked("nothing", parse("nothing")), 2048) == FIRST_BATCH

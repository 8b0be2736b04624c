"""Published steps: their file is checked, a step that fails doesn't end the others, and a filed program isn't compiled again."""

import json
import lzma

import msgspec
import pytest

from experiments import published
from experiments.common import RESULTS
from experiments.kernel_times import whole_steps
from experiments.published import FILE, Flags, read_rows
from jaxremat.chips.nvidia.calibration import load_calibration
from jaxremat.chips.tpu.device import load_tpu
from jaxremat.errors import JaxrematError, UsageError
from jaxremat.policy.grammar import parse
from jaxremat.xla import hlo

STEP = """
[[step]]
name = "tiny"
about = "a step"
target = "a100-80gb"
mesh = "fsdp=2"
model = "tiny"
options = { num_layers = 1, seq_len = 64 }
batch = 2
policy = "nothing"
measured_s = 1.0
source = "none: made up"
"""
ROWS = read_rows(FILE)
BYTES = STEP.replace("[[step]]", "[[bytes]]") + "total_gib = 1.0\ntemp_gib = 0.5\n"


def rows_in(folder, text):
    file = folder / "rows.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (STEP + "bacth = 2\n", "bacth"),
        (STEP.replace("batch = 2", ""), "batch"),
        (STEP.replace("batch = 2", 'batch = "2"'), "batch"),
        (STEP.replace("[[step]]", "[[steps]]"), "steps"),
        (STEP + STEP, "tiny"),
        (STEP + BYTES, "tiny"),
        (STEP + 'maxtext = "model_name=x"\n', "tiny"),
        (STEP.replace('model = "tiny"', ""), "tiny"),
        (STEP + "[", "rows.toml"),
    ],
)
def test_rows_that_cannot_be_meant_are_one_error(text, says, tmp_path):
    with pytest.raises(UsageError) as raised:
        read_rows(rows_in(tmp_path, text))
    assert says in raised.value.got


def test_the_rows_that_are_filed_can_be_read():
    rows = read_rows(FILE)
    assert {step.target for step in rows.step} == {"h100-80gb", "a100-80gb"}
    assert all(step.measured_s > 0 and step.source for step in (*rows.step, *rows.bytes))
    for step in (*rows.step, *rows.tpu):
        parse(step.policy)


def command(*argv):
    return published.main([*argv])


def test_what_files_nothing(tmp_path, capsys):
    """Rows of others beside the results of these, and a target of no row."""
    rows = rows_in(tmp_path, STEP)
    assert command("--rows", str(rows)) == 2
    assert "--out" in capsys.readouterr().err
    assert command("--rows", str(rows), "--out", str(tmp_path / "out"), "--parts", "bytes") == 2
    assert "h100-80gb" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("step", [*ROWS.step, *ROWS.tpu, *ROWS.alone], ids=lambda step: step.name)
def test_each_program_is_filed_as_its_row_says(step):
    """A row that changed is compiled again before its results are filed."""
    header = lzma.decompress((RESULTS / "published" / f"{step.name}.hlo.xz").read_bytes()).partition(b"\n")[0]
    assert json.loads(header)["step"] == step.compiled_from


def test_a_filed_program_has_the_scope_of_the_embedding_and_no_other():
    """Its gradient has a time by its scope. What else a program says of its source isn't filed."""
    text = lzma.decompress((RESULTS / "published" / "h100-gpt2-nothing.hlo.xz").read_bytes()).decode()
    assert {line.count("scatter-add") > 0 for line in text.splitlines() if "metadata={" in line} == {True}
    assert "/embedding/" in text


def test_the_interval_of_one_gpu_has_the_whole_steps_that_were_measured():
    rows = json.loads((RESULTS / "h100-80gb/published.json").read_text())["alone"]
    assert [row["name"] for row in rows] == [step.name for step in read_rows(FILE).alone]
    assert len(whole_steps()) > len(rows)
    assert all(abs(longer) <= load_calibration((9, 0)).error for longer in whole_steps())


@pytest.mark.full
def test_the_filed_seconds_are_those_of_the_filed_programs():
    """A clock that changed is filed anew: `python -m experiments.published` compiles nothing for it."""
    filed = {row["name"]: row for row in json.loads((RESULTS / "h100-80gb/published.json").read_text())["steps"]}
    assert filed.keys() == {step.name for step in read_rows(FILE).step}
    for step in read_rows(FILE).step:
        if step.target == "h100-80gb" and step.maxtext and "llama2-7b" not in step.maxtext:  # the others are larger texts
            for name, seconds in published.predicted(*published.program_of(step, Flags())).items():
                assert filed[step.name][name] == pytest.approx(seconds, rel=1e-6), (step.name, name)
    alone = {row["name"]: row for row in json.loads((RESULTS / "h100-80gb/published.json").read_text())["alone"]}
    for step in read_rows(FILE).alone:
        for name, seconds in published.predicted(*published.program_of(step, Flags())).items():
            assert alone[step.name][name] == pytest.approx(seconds, rel=1e-6), (step.name, name)


@pytest.mark.full
@pytest.mark.parametrize("step", ROWS.tpu, ids=lambda step: step.name)
def test_the_filed_seconds_of_a_tpu_are_those_of_its_program(step):
    """They are within the interval of its generation. The filed text is read, whichever libtpu is here."""
    rows = {row["name"]: row for row in json.loads((RESULTS / step.target / "published.json").read_text())["steps"]}
    header, _, text = lzma.decompress((RESULTS / "published" / f"{step.name}.hlo.xz").read_bytes()).decode().partition("\n")
    program = msgspec.json.decode(header, type=published.Program)
    for name, seconds in published.predicted(program, hlo.parse(text)).items():
        assert rows[step.name][name] == pytest.approx(seconds, rel=1e-6), name
    fitted = load_tpu(step.target).fitted
    assert fitted is not None
    assert abs(rows[step.name]["longer"]) <= fitted.error


@pytest.mark.full
def test_published(tmp_path, h100, capsys, monkeypatch):
    wrong = STEP.replace('name = "tiny"', 'name = "wrong"').replace('"nothing"', '"no-such-policy"')
    argv = ["--rows", str(rows_in(tmp_path, wrong + STEP)), "--out", str(tmp_path)]

    def rows():
        assert command(*argv) == 0
        return json.loads((tmp_path / "h100-80gb/published.json").read_text())["steps"]

    failed, row = rows()
    assert "no-such-policy" in failed["error"]
    assert (row["num_devices"], row["target"], row["whose"]) == (2, "a100-80gb", "our decoder")
    assert row["longer"] == pytest.approx(1 / row["predicted_s"] - 1, rel=1e-5)
    parts = [row[name] for name in ("matmul_s", "attention_s", "collective_exposed_s", "other_s")]
    assert sum(parts) == pytest.approx(row["predicted_s"], rel=1e-5)
    assert min(row["matmul_s"], row["attention_s"], row["other_s"]) > 0
    assert row["collective_s"] >= row["collective_exposed_s"] >= 0

    def rejected(step, versions):
        raise JaxrematError(f"{step.name} was compiled")

    monkeypatch.setattr(published, "_compiled", rejected)
    assert rows()[1] == row
    argv.append("--fresh")
    assert "tiny was compiled" in rows()[1]["error"]
    assert "tiny" in capsys.readouterr().out

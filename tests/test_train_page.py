"""The commands of docs/train.md run as they stand there, with a smaller model and fewer steps."""

import re
import shlex
from pathlib import Path

import pytest

from jaxremat.chips.target import load_target
from jaxremat.cli.command import parse_flags
from jaxremat.cli.train import TrainRunFlags, batch_to_train, check_train, main, trials_to_train, with_default_batch
from jaxremat.session.answers import policy_of
from jaxremat.session.session import Session
from jaxremat.training.metrics import read_metrics
from jaxremat.training.run_folder import RunFolder, config_of
from jaxremat.trial.plan_file import load_plan
from tests.arguments import once

PAGE = (Path(__file__).parent.parent / "docs/train.md").read_text()
COMMANDS = re.findall(r"^(.*)\.venv/bin/python -m jaxremat train (.*)$", PAGE, re.MULTILINE)
#: A decoder of one small layer. What is planned with one loss and one layout takes fewer compiles.
SMALL = shlex.split(
    "--num-layers 1 --embed-dim 16 --mlp-dim 32 --num-heads 2 --num-kv-heads 2 --head-dim 8 --dropout 0 --seq-len 16 "
    "--dtype float32 --scan-layers True"
)
#: Few steps. The first training is evaluated and writes text, too, for which XLA compiles more.
FEW = shlex.split("--target cpu --num-steps 3 --eval-batches 2 --eval-every")
FIRST, OTHERS = (("2", "--sample-tokens", "5"), ("0", "--sample-tokens", "0"))


def begin(argv: list[str]) -> None:
    """Everything of a command before it compiles: its folder takes the configuration."""
    target = load_target("cpu")
    request = with_default_batch(check_train(parse_flags(TrainRunFlags, argv)), target)
    session = Session.of(request, target)
    (asked,) = session.request.policies
    trials = trials_to_train(session, asked, quiet=True, folder=None)
    config = config_of(trials, str(policy_of(asked)), batch_to_train(session, asked))
    if request.flags.run_dir:
        assert len(RunFolder(request.flags.run_dir).compared(config)) == 1, "the policy alone"


@pytest.mark.full
def test_the_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    """Later ones resume in the folders of earlier ones. What would compile the same again is stopped before it compiles."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    folders: list[str] = []
    for variables, text in COMMANDS:
        argv = shlex.split(text)
        if variables:
            continue  # it needs a process with several devices, as tests/test_train_ends.py has
        folder = argv[argv.index("--run-dir") + 1] if "--run-dir" in argv else ""
        argv = once(*argv, *(SMALL if "tiny" in argv else ()), *FEW, *(OTHERS if folders else FIRST))
        if folder and folder not in folders:
            folders.append(folder)
            assert main(once(*argv, *(("--loss", "full") if "tiny" in argv else ()))) == 0, capsys.readouterr().err
        else:
            begin(argv)
    rows = [read_metrics(Path(folder, "metrics.jsonl")) for folder in folders]
    assert all([row["step"] for row in of_folder] == [1, 2, 3] for of_folder in rows)
    assert [row["eval_loss"] is not None for row in rows[0]] == [False, True, True]
    assert all(0 < row["loss"] < 6 and row["tokens_per_s"] > 0 for row in rows[0])
    assert load_plan("runs/auto/plan.json").proven.target == "h100-80gb"
    assert capsys.readouterr().out.count("'The ") == 2, "the text before and after the first training"


def test_the_commands_of_the_page_are_read():
    assert len(COMMANDS) >= 6
    for _, text in COMMANDS:
        flags = parse_flags(TrainRunFlags, shlex.split(text))
        if "plan:" not in text and "mine.py" not in text:  # files that the page's reader has by then
            check_train(flags)

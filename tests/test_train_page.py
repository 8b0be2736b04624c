"""The commands of docs/train.md run as they stand there, with a smaller model and fewer steps."""

import re
import shlex
from pathlib import Path

import pytest

from jaxremat.command import parse_flags
from jaxremat.train import TrainRunFlags, check_train, main

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/train.md").read_text()
COMMANDS = re.findall(r"^(.*)\.venv/bin/python -m jaxremat\.train (.*)$", PAGE, re.MULTILINE)
SMALL = "--num-layers 1 --embed-dim 16 --mlp-dim 32 --num-heads 2 --num-kv-heads 2 --head-dim 8 --dropout 0 --seq-len 16"


#: What is planned with one loss takes half of the compiles.
LIGHT = ("--loss", "full")


@pytest.mark.any_jax
def test_the_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    """Later ones go on with the folders of earlier ones."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    num_steps = 2
    for variables, text in COMMANDS:
        argv = shlex.split(text)
        check_train(parse_flags(TrainRunFlags, argv))
        if variables:
            continue  # it needs a process with several devices, as tests/test_train_ends.py has
        small = [*SMALL.split(), *(() if "plan:" in text else LIGHT)] if "tiny" in argv else []
        num_steps += 1
        few = ("--num-steps", str(num_steps), "--sample-tokens", "0", "--eval-every", "0", "--target", "cpu")
        assert main([*argv, *small, *few]) == 0, capsys.readouterr().err
    assert len((tmp_path / "runs/dots/metrics.jsonl").read_text().splitlines()) == num_steps
    assert (tmp_path / "runs/auto/plan.json").exists()
    assert "planned for h100-80gb" in capsys.readouterr().out


def test_the_page_has_commands():
    assert len(COMMANDS) >= 6

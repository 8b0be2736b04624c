"""Files of records and folders of trainings that were damaged, edited, cut, or made by something else.

What such a file holds stays as it was, or is moved aside, and no command writes into what it doesn't know.
"""

import json
import os
import random
from pathlib import Path

from experiments.bad_inputs.case import OK, USAGE, Case, in_fork_of, kind
from experiments.bad_inputs.files import NAMES

#: What a file that no command wrote may begin with.
_FOREIGN = (
    b"a,b,c\n1,2,3\n",
    b"#!/bin/sh\nrm -rf /\n",
    b"import jax\n",
    b"\x89PNG\r\n\x1a\n\x00\x00",
    b"\x1f\x8b\x08\x00\x00\x00",
    b"PK\x03\x04\x14\x00",
    b"%PDF-1.7\n",
    b"SQLite format 3\x00",
    b"<?xml version='1.0'?>\n",
    b"[1, 2, 3]\n",
    b"null\n",
    b"3.5\n",
    b'"text"\n',
    b"\n\n\n",
    b" \n",
    b"\x00" * 4096,
    b"\xff\xfe{\x00",
    b"\xef\xbb\xbf{}\n",
    b'{"a": 1}\n',
    b"{}\n",
    b'{"record": "trial"}\n',
    b'{"record": "trial", "schema": "2"}\n',
    b'{"schema": 2}\n',
    b"{" * 100_000 + b"\n",
    b"no newline at the end",
)
_TINY = ("--model", "tiny", "--num-layers", "1", "--batch", "1")
#: Commands that open what --out holds before anything is compiled. Where it is taken, they end soon: at a value that doesn't
#: exist, or with a shard without trials.
_WRITERS = (
    ("run", *_TINY, "--policy", "save:no_such_name", "--target", "cpu"),
    ("explain", *_TINY, "--policy", "save:no_such_name", "--target", "cpu"),
    ("sweep", *_TINY, "--policy", "dots", "--target", "cpu", "--shard", "2/2"),
)


@kind("stores")
def foreign_files(draw: random.Random, folder: Path) -> Case:
    """A file that isn't of records, behind --out. It stays as it is."""
    path, data = folder / draw.choice(["r.jsonl", *NAMES]), draw.choice(_FOREIGN)
    path.write_bytes(data)
    return Case((*draw.choice(_WRITERS), f"--out={path}"), USAGE, says=("--out",), unchanged={path: data})


def _row(**fields: object) -> bytes:
    return (json.dumps({"key": "0" * 32, "part": 1, "parts": 1, "record": "probe", "schema": 2} | fields) + "\n").encode()


_DAMAGED = (
    _row(schema=True),
    _row(part=-1),
    _row(part=2),
    _row(parts=10**30),
    _row(key=3),
    _row(key=""),
    _row(record="no such record"),
    _row(record=None),
    _row(record=["probe"]),
    _row(batch=-1, total_bytes=-5, policy=3),
    _row(batch=10**400),
    b'{"record": "trial", "schema": 2, "step_s": NaN}\n',
    b'{"record": "trial", "schema": 2, "step_s": Infinity, "key": "x"}\n',
    b'{"record": "trial", "schema": 2, "key": "x", "part": 1, "par',
    b'{"record": "trial", "schema": 2}\n{"record": "tri\n',
    b'{"record": "trial", "schema": 2}\n\x00\x00\x00\x00\n',
    b'{"record": "trial", "schema": 2}\n\xff\xfe\n',
    b'{"record": "trial", "schema": 2}\n' + b"[" * 100_000 + b"\n",
    b'{"record": "trial", "schema": 2}\n<<<<<<< HEAD\n=======\n>>>>>>> main\n',
    b'{"record": "trial", "schema": 2}\r\n',
    b'{"record": "trial", "schema": 2}' * 2 + b"\n",
    b'{"record": "trial", "schema": 2, "policy": "[/red] \\u001b[31m"}\n',
)


@kind("stores")
def damaged_rows(draw: random.Random, folder: Path) -> Case:
    """Rows that are cut, edited, or of another version. They stay, or are moved aside."""
    path = folder / "r.jsonl"
    data = b"".join(draw.sample(_DAMAGED, draw.randrange(1, 5)))
    if not data.startswith(b'{"'):
        data = _row() + data
    path.write_bytes(data)

    return Case((*draw.choice(_WRITERS), f"--out={path}"), OK | USAGE, check=lambda ended: _lost(path, data))


def _lost(path: Path, data: bytes) -> str:
    """How many lines of `data` are neither in the file at `path` nor in the one beside it. Empty where none is lost."""
    aside = path.with_name(f"{path.name}.damaged")
    there = path.read_bytes() + (aside.read_bytes() if aside.exists() else b"")
    lost = [line for line in data.splitlines() if line not in there]
    return f"{len(lost)} lines are lost" if lost else ""


def _append(path: Path) -> int:
    """Appends the records of a trial, and returns 0 if another command finds them there."""
    from jaxremat.trial.record import FailureRecord
    from jaxremat.trial.store import Store

    known = {"model": "m", "requested_policy": "dots", "target": "t", "batch": 1, "outcome": "crashed", "error": "e"}
    known |= {"tail": (), "duration_s": 1.0, "config": {}, "xla_flags": None, "versions": {}}
    record = FailureRecord(**known)  # pyright: ignore[reportArgumentType]
    with Store(path) as store:
        store.append([record], "f" * 32)
    with Store(path) as store:
        return int(store.trial("f" * 32) != (record,))


@kind("stores")
def appended_to_damaged_rows(draw: random.Random, folder: Path) -> Case:
    """Records behind damaged rows: they are found again, and nothing that was there is lost."""
    path = folder / "r.jsonl"
    data = _row() + b"".join(draw.sample(_DAMAGED, draw.randrange(1, 5)))
    if draw.random() < 0.5:
        data = data[: draw.randrange(len(_row()), len(data))]
    path.write_bytes(data)
    command = ("python", "append", path.name)
    return Case(command, OK, run=in_fork_of(lambda: _append(path)), check=lambda ended: _lost(path, data))


@kind("stores")
def newer_schemas(draw: random.Random, folder: Path) -> Case:
    """Rows of another version, behind --out. The file stays as it is."""
    path, data = folder / "r.jsonl", _row(schema=draw.choice([1, 3, 99, 10**30]))
    if draw.random() < 0.5:
        data = _row() + data
    path.write_bytes(data)
    return Case((*draw.choice(_WRITERS), f"--out={path}"), USAGE, says=("--out", "schema"), unchanged={path: data})


@kind("stores")
def no_files(draw: random.Random, folder: Path) -> Case:
    """A path behind --out that can't be a file of records."""
    flag = draw.choice(["--out", "--csv", "--save-plan", "--page"])
    place = draw.choice(
        ["folder", "nowhere/r.jsonl", "file/r.jsonl", "loop", "x" * 300, "/proc/nope", "folder/", "/", ".", "null\x7f/a"]
    )
    (folder / "folder").mkdir()
    (folder / "file").write_text("text")
    (folder / "loop").symlink_to(folder / "loop")
    commands = {
        "--out": draw.choice(_WRITERS),
        "--csv": (*_WRITERS[2][:-2], "--out", "r.jsonl"),
        "--save-plan": ("run", *_TINY, "--policy", "auto"),
        "--page": _WRITERS[1],
    }
    unchanged = {folder / "file": b"text"}
    return Case((*commands[flag], f"{flag}={place}"), USAGE, says=(flag,), unchanged=unchanged)


@kind("stores")
def pipes(draw: random.Random, folder: Path) -> Case:
    """A device behind --out is written to, and a value that doesn't exist still ends the command."""
    name = draw.choice(["/dev/null", "/dev/stdout", "/dev/stderr", "/dev/full"])
    return Case((*draw.choice(_WRITERS), f"--out={name}"), OK | USAGE)


@kind("stores")
def edited_run_folders(draw: random.Random, folder: Path) -> Case:
    """A folder behind --run-dir whose files were edited, or of another program. They stay as they are."""
    run = folder / draw.choice(["run", "[red] ü", "-r"])
    run.mkdir()
    data = draw.choice(
        [*_FOREIGN, b"", b'{"decides": 3, "rounding": []}', b'{"decides": {}}', b'{"decides": {}, "rounding": {}, "x": 1}']
    )
    data = draw.choice([data, b'{"decides": {"num_layers": 99}, "rounding": {}}', b'{"decides": null, "rounding": null}'])
    (run / "config.json").write_bytes(data)
    (run / "metrics.jsonl").write_bytes(draw.choice([b"", b"x\n", b'{"step": 1, "loss": NaN}\n']))
    unchanged = {path: path.read_bytes() for path in sorted(run.iterdir())}
    command = ("train", *_TINY, "--seq-len", "16", "--policy", "nothing", "--num-steps", "1", f"--run-dir={run}")
    return Case(command, USAGE, says=("--run-dir",), unchanged=unchanged)


@kind("stores")
def no_run_folders(draw: random.Random, folder: Path) -> Case:
    """A path behind --run-dir that can't be a folder."""
    (folder / "file").write_text("text")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "locked").mkdir()
    os.mkfifo(folder / "locked" / "lock")
    place = draw.choice(["file", "file/run", "loop", "x" * 300, "/proc/nope", "/dev/null"])
    command = ("train", *_TINY, "--seq-len", "16", "--num-steps", "1", f"--run-dir={place}")
    return Case(command, USAGE, says=("--run-dir",), unchanged={folder / "file": b"text"})


@kind("stores")
def stores_as_written(draw: random.Random, folder: Path) -> Case:
    """A list beside --out: under odd names and behind links, where nothing is written."""
    path = folder / draw.choice(NAMES)
    if draw.random() < 0.5:
        path.write_bytes(_row())
    return Case(("run", "--list", draw.choice(["policies", "models"]), f"--out={path}"), OK)

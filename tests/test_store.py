"""A row appended to a store is there, once and whole, whatever happened to the file or the disk before."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from jaxremat.errors import JaxrematError, UsageError
from jaxremat.trial.details import SCHEMA
from jaxremat.trial.lines import from_row
from jaxremat.trial.store import Store, content_key
from tests.made_up_records import record


def rows(path: Path) -> list[dict]:
    """Every line parsed: one that is no JSON fails the test."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path) -> Path:
    """A store with a trial of two rows, a row of a `run`, and a trial of one."""
    path = tmp_path / "rows.jsonl"
    with Store(path) as store:
        store.append([record(1), record(2)], "first")
        store.append([record(3)])
        store.append([record(4)], "second")
    return path


def test_what_was_appended_is_there(path):
    assert [(r.get("key"), r.get("part"), r.get("parts"), from_row(r)) for r in rows(path)] == [
        ("first", 1, 2, record(1)),
        ("first", 2, 2, record(2)),
        (None, None, None, record(3)),
        ("second", 1, 1, record(4)),
    ]
    with Store(path) as store:
        assert store.trial("first") == (record(1), record(2))
        assert store.trial("third") is None
        assert store.notes == []


def test_a_finished_trial_is_not_written_twice(path):
    before = path.read_bytes()
    with Store(path) as store:
        store.append([record(9)], "first")
        assert path.read_bytes() == before
        store.forget("first")
        store.append([record(9)], "first")
    with Store(path) as store:
        assert store.trial("first") == (record(9),), "the newest counts"


def test_fresh_takes_only_new_ones_for_done(path):
    with Store(path, fresh=True) as store:
        assert store.trial("first") is None
        store.append([record(9)], "first")
        assert store.trial("first") is not None
        assert store.trial("second") is None
    assert len(rows(path)) == 5


def test_every_kind_of_cut_heals(path):
    """Cut within a row, around its end, or anywhere: whole trials stay, the rest is set aside, the next append is sound."""
    whole = path.read_bytes()
    aside = path.with_name("rows.jsonl.damaged")
    ends = [0, *(len(b"".join(whole.splitlines(keepends=True)[:n])) for n in (2, 3, 4))]
    around = {end + n for end in ends for n in (-2, -1, 0, 1, 2)} | {*range(1, len(whole), 97)}
    for cut in sorted(around & {*range(1, len(whole))}):
        path.write_bytes(whole[:cut])
        aside.unlink(missing_ok=True)
        with Store(path) as store:
            store.append([record(5)], "third")
        keep = max(end for end in ends if end <= cut)
        if cut + 1 in ends[1:]:  # only the newline was gone
            keep = cut + 1
        assert path.read_bytes().startswith(whole[:keep])
        numbers = [r["batch"] for r in rows(path)]
        assert numbers == [*[r["batch"] for r in map(json.loads, whole[:keep].splitlines())], 5], cut
        if keep < cut:
            assert aside.read_bytes().rstrip(b"\n") == whole[keep:cut].rstrip(b"\n")
            (note,) = store.notes
            assert all(str(file) in note for file in (path, aside))
        else:
            assert not aside.exists()
            assert store.notes == []


def test_a_broken_line_in_the_middle_stays_and_is_named(path):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "{{ oops", *lines[2:]]) + "\n")
    before = path.read_text()
    with Store(path) as store:
        store.append([record(5)], "third")
        assert store.trial("first")
        assert store.trial("second")
        (note,) = store.notes
        assert note.startswith(str(path))
        assert "{{ oops" in note
    assert path.read_text().startswith(before)


def test_a_record_of_wrong_types_stays_and_is_named(path):
    """Its trial is done again; the others count."""
    text = path.read_text().replace('"batch": 4', '"batch": "4"')
    path.write_text(text)
    with Store(path) as store:
        assert store.trial("second") is None
        assert store.trial("first")
        store.append([record(4)], "second")
        assert store.trial("second") == (record(4),)
        (note,) = store.notes
        assert note.startswith(str(path))
        assert all(word in note for word in ("'failure'", "batch", "int", "str"))
    assert path.read_text().startswith(text)


def test_a_row_that_cannot_be_right_is_not_used(path):
    """Its line is named, and stays. The other row of its trial stays beside it."""
    lines = path.read_text().splitlines()
    for number, changes in (
        (1, '"batch": 0'),
        (1, '"batch": NaN'),
        (2, '"duration_s": 1e999'),
        (2, '"schema": 2, "part": 3'),
    ):
        field = changes.partition(":")[0]
        spoilt = [*lines]
        spoilt[number - 1] = re.sub(rf"{field}: [^,]+", changes, lines[number - 1])
        assert spoilt != lines
        for left in (spoilt, spoilt[:2]):  # with trials after it, and alone
            path.write_text("\n".join(left) + "\n")
            with Store(path) as store:
                assert store.trial("first") is None
                assert bool(store.trial("second")) == (len(left) > 2)
                assert [f"{path}, line {number} " in note for note in store.notes] == [True] * ("part" not in changes)
                store.append([record(7)], "first")
                assert store.trial("first") == (record(7),)
            assert path.read_text().splitlines()[:-1] == left
            assert os.listdir(path.parent) == [path.name]


def test_rows_of_two_trials_make_no_trial(path):
    """Part 1 of one trial before part 2 of another, as after a merge of two files line by line."""
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1].replace('"first"', '"other"')]) + "\n")
    with Store(path) as store:
        assert (store.trial("first"), store.trial("other")) == (None, None)


@pytest.mark.parametrize(
    "text",
    [
        *("my notes\nof the day\n", "my notes", "[1, 2]\n", "[1, 2]", "\n\n", "{\n", "\x00\x01binary\n", "\ufeff{}\n"),
        *('{"a": 1}\n', '{"a": 1}', '{"a": 1, "b', '{"key": "a"}', '{"key": "a"}\n{"key": "b"}\n', "model,batch\ngpt2,4\n"),
        *('{"record": "song", "schema": 2}\n', '{"record": "trial", "schema": true}\n', '{"record": [], "schema": 2}\n'),
        json.dumps(asdict(record()) | {"schema": SCHEMA + 1}),
        json.dumps(asdict(record())) + "\n" + json.dumps(asdict(record()) | {"schema": SCHEMA + 1}),
    ],
)
def test_something_else_than_records_is_not_touched(tmp_path, text):
    """Whether or not its last line has an end."""
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        Store(path)
    assert f"--out {str(path)!r}" in caught.value.got
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_newer_schema_is_not_touched(path):
    with path.open("a") as file:
        file.write(json.dumps(asdict(record(5)) | {"schema": SCHEMA + 1, "key": "new"}) + "\n")
    before = path.read_bytes()
    with pytest.raises(UsageError) as caught:
        Store(path)
    assert f"--out {str(path)!r}" in caught.value.got
    assert {str(SCHEMA), str(SCHEMA + 1)} <= {*re.findall(r"\d+", caught.value.got)}
    assert path.read_bytes() == before


@pytest.mark.full
def test_a_full_disk_leaves_the_file_as_it_was(path, tmp_path):
    """A limit on file sizes cuts the write short where a full disk would; then there is room again."""
    before = path.read_bytes()
    program = f"""
import resource
from pathlib import Path
from jaxremat.errors import JaxrematError
from jaxremat.trial.store import Store
from tests.made_up_records import record
with Store(Path({str(path)!r})) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 50}, resource.RLIM_INFINITY))
    try:
        store.append([record(5), record(6)], "third")
    except JaxrematError as error:
        print(error.got)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(Path({str(path)!r}).stat().st_size == {len(before)})
    store.append([record(7)], "third")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    got, is_as_before = done.stdout.splitlines()
    assert f"--out {str(path)!r}" in got
    assert is_as_before == "True"
    assert path.read_bytes().startswith(before)
    assert [r["batch"] for r in rows(path)] == [1, 2, 3, 4, 7]


def test_a_full_device():
    with Store(Path("/dev/full")) as store, pytest.raises(JaxrematError) as caught:
        store.append([record()])
    assert "--out '/dev/full'" in caught.value.got


def test_a_folder_that_cannot_be_written(tmp_path):
    for path in (tmp_path / "no" / "rows.jsonl", tmp_path):
        with pytest.raises(UsageError) as caught:
            Store(path)
        assert f"--out {str(path)!r}" in caught.value.got


@pytest.mark.full
def test_a_read_only_folder(tmp_path):
    """As the user nobody, as root may write anywhere: a new file is rejected, one that is there and one's own is not."""
    if os.getuid():
        pytest.skip("only root can become another user")
    folder = tmp_path / "folder"
    folder.mkdir()
    theirs = folder / "rows.jsonl"
    theirs.touch()
    theirs.chmod(0o666)
    folder.chmod(0o555)
    for parent in folder.parents:
        parent.chmod(parent.stat().st_mode | 0o055) if parent != Path("/") else None

    def as_nobody(queue):
        os.setuid(65534)
        try:
            Store(folder / "new.jsonl")
        except UsageError as error:
            queue.put(error.got)
        with Store(theirs) as store:
            store.append([record(1)], "key")

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=as_nobody, args=(queue,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert "new.jsonl" in queue.get()
    assert len(rows(theirs)) == 1
    assert [path.name for path in folder.iterdir()] == ["rows.jsonl"], "no lock files"


WRITER = """
import sys
import time
from pathlib import Path
from jaxremat.trial.store import Store
from tests.made_up_records import record
with Store(Path(sys.argv[1])) as store:
    for number in range(1, 51):
        store.append([record(number)] * 3, f"{sys.argv[2]}-{number}")
"""


@pytest.mark.full
def test_four_writers_at_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)]) for n in range(4)]
    assert [writer.wait(120) for writer in writers] == [0] * 4
    found = rows(path)
    assert len(found) == 600
    for start in range(0, 600, 3):
        assert len({r["key"] for r in found[start : start + 3]}) == 1, "a trial's rows stand together"


@pytest.mark.full
def test_a_claim_goes_with_its_process(tmp_path):
    path = tmp_path / "rows.jsonl"
    program = f"""
import time
from pathlib import Path
from jaxremat.trial.store import Store
with Store(Path({str(path)!r})) as store:
    print(store.claim("trial"), flush=True)
    time.sleep(1000)
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert other.stdout
    assert other.stdout.readline() == "True\n"
    with Store(path) as store:
        assert not store.claim("trial")
        assert store.claim("another")
        store.append([record()], "another")  # appending goes on under the claims of others
        other.send_signal(signal.SIGKILL)
        other.wait()
        for _ in range(100):
            if store.claim("trial"):
                break
            time.sleep(0.05)
        else:
            pytest.fail("the claim of a killed process stayed")
        store.release("trial")
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


def test_the_key_is_of_the_content():
    assert content_key({"a": 1, "b": [2.5, None]}) == content_key({"b": [2.5, None], "a": 1})
    assert content_key({"a": 1}) != content_key({"a": 1.5}) != content_key({"a": "1"})


def test_a_copied_store_is_a_store(path, tmp_path):
    shutil.copy(path, tmp_path / "copy.jsonl")
    with Store(tmp_path / "copy.jsonl") as store:
        assert store.trial("first")

"""The store: a file of records, one JSON object a line.

No record is lost, and none is there twice.

A trial of a sweep has a key, a hash of the request. Its records carry the key and their place among the records of
the trial, and are written in one piece:

    {"key": "5f0c...", "part": 1, "parts": 2, "record": "probe", "schema": 2, "model": "gpt2", "batch": 4, ...}
    {"key": "5f0c...", "part": 2, "parts": 2, "record": "trial", "schema": 2, "model": "gpt2", "batch": 8, ...}

So a trial is in the file as a whole or not at all. Where a crash or a full disk cut a line short, the next append moves what
is left of the trial to `FILE.damaged`, and the trial counts as not done.

Several processes may work on one store. They lock bytes far beyond the end of the file (POSIX locks, which NFS, Lustre and
local disks have): one byte for appending, and for each trial one of 2**62, so that no two processes work on the same trial.
There are no lock files, and a lock ends with its process, however that dies. A process must not open its store twice:
closing one of the two would end the locks of both.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxremat.errors import JaxrematError, UsageError
from jaxremat.system.files import named_by, parse_json, unwritten
from jaxremat.trial.details import SCHEMA
from jaxremat.trial.lines import KINDS, from_row, in_words, to_json, writer_of
from jaxremat.trial.record import Record

#: The flag that names the file.
_FLAG = "--out"
_APPEND_BYTE = 2**61
_FIRST_CLAIM = 2**62
#: How a row begins. By it a row that was damaged is told from the text of another program.
_BEGINNINGS = (b'{"key": "', b'{"record": "')


@dataclass(frozen=True)
class Place:
    """Where a record belongs.

    Attributes:
        key: the trial.
        part: number of the record in the trial, from 1.
        parts: how many records the trial has.
    """

    key: str
    part: int
    parts: int


def placed(key: str, records: Iterable[Record]) -> list[tuple[Place, Record]]:
    """All records of the trial `key`, each with its place."""
    records = tuple(records)
    return [(Place(key, number, len(records)), record) for number, record in enumerate(records, 1)]


def content_key(content: Any) -> str:
    """A hash of the content's canonical JSON: equal for equal content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


class Store(contextlib.AbstractContextManager["Store"]):
    """A file of records, as a context.

    Args:
        path: the file, which is made if it isn't there. A file that isn't a regular one (a pipe, `/dev/stdout`) is only
            written.
        flag: the flag that named the file, for messages.
        fresh: whether only trials that are appended from now on count as done.

    Attributes:
        path: the file.
        notes: which of its lines are damaged, or can't be right, in words.

    Raises:
        UsageError: the file can't be written, has something else than records, or records of another schema.
        JaxrematError: later, an append failed; the file is then as it was before.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path, self.notes = path, list[str]()
        self._trials: dict[str, tuple[Record, ...]] = {}
        self._offset = self._num_lines = 0  # where the rows end that were read, and how many lines are before
        with named_by(_FLAG, path, "give a file in a folder that exists and is yours", UsageError):
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        try:
            if self._regular and os.pread(self._file, 1, 0) not in (b"", b"{"):
                raise self._not_a_store()
            self.refresh()
            self._check_cut()
        except BaseException:
            os.close(self._file)
            raise
        if fresh:
            self._trials.clear()

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def trial(self, key: str) -> tuple[Record, ...] | None:
        """The records of a finished trial; None if it wasn't there when the file was last read."""
        return self._trials.get(key)

    def forget(self, key: str) -> None:
        """Makes a finished trial count as not done.

        Its records stay in the file, and newer ones will count instead.
        """
        self._trials.pop(key, None)

    def claim(self, key: str) -> bool:
        """Claims the trial for this process, until `release` or the process's end.

        Returns:
            False where another process has claimed it.
        """
        try:
            self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, _claim_byte(key))
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            raise JaxrematError(
                f"{_FLAG} {str(self.path)!r} cannot be locked: {error.strerror}",
                cause="its file system has no locks, or they are switched off",
                next_step="give a file on another file system",
            ) from None
        return True

    def release(self, key: str) -> None:
        """Ends the claim."""
        self._lock(fcntl.LOCK_UN, _claim_byte(key))

    def refresh(self) -> None:
        """Reads what other processes appended since."""
        *lines, _ = self._read_from(self._offset).split(b"\n")
        end, number = self._offset, self._num_lines
        key, trial = "", list[Record]()  # the records read so far of the trial that is being read
        for line in lines:
            end, number = end + len(line) + 1, number + 1
            place, record = self._parse(line, number) or (None, None)
            if place and place.part == 1:
                key, trial = place.key, []
            if place and record and (place.key, place.part) == (key, len(trial) + 1):
                trial.append(record)
                if place.part < place.parts:
                    continue
                self._trials[key] = tuple(trial)
            trial = []
            self._offset, self._num_lines = end, number

    def append(self, records: Iterable[Record], key: str | None = None) -> None:
        """Appends records in one piece, and returns when they are on disk.

        Those of a finished trial come with its key.

        A trial that is there already isn't written again.

        Raises:
            JaxrematError: the disk is full, or the like; the file is as it was before.
        """
        lines = (
            map(to_json, records) if key is None else (to_json(record, **vars(at)) for at, record in placed(key, records))
        )
        text = "".join(line + "\n" for line in lines).encode()
        try:
            with self._appending():
                if key is None or key not in self._trials:
                    self._write(text)
        except OSError as error:
            next_step = "free some room, or give another file; the rows written before are kept"
            raise unwritten(_FLAG, self.path, error, next_step) from None

    @contextlib.contextmanager
    def _appending(self) -> Iterator[None]:
        """A context in which only this process appends.

        The file has been read, and it ends with a whole trial.
        """
        self._lock(fcntl.LOCK_EX, _APPEND_BYTE)
        try:
            self.refresh()
            self._heal()
            yield
            self.refresh()
        finally:
            self._lock(fcntl.LOCK_UN, _APPEND_BYTE)

    def _lock(self, how: int, byte: int) -> None:
        if self._regular:
            fcntl.lockf(self._file, how, 1, byte)

    def _write(self, text: bytes) -> None:
        size = os.fstat(self._file).st_size
        try:
            rest = memoryview(text)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if self._regular:
                os.fsync(self._file)
        except OSError:
            if self._regular:
                os.ftruncate(self._file, size)
            raise

    def _heal(self) -> None:
        """Moves aside what follows the last whole trial.

        The process that wrote it died, or the disk was full.
        """
        tail = self._read_from(self._offset)
        if _parsed(tail.rpartition(b"\n")[2]) is not None:  # a whole line, but for its newline
            self._write(b"\n")
            self.refresh()
            tail = self._read_from(self._offset)
        if not tail:
            return
        aside = self.path.with_name(self.path.name + ".damaged")
        with aside.open("ab") as file:
            file.write(tail.removesuffix(b"\n") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.ftruncate(self._file, self._offset)
        self.notes.append(f"{self.path}: the last row was cut short; what there was of it is in {aside}")

    def _read_from(self, offset: int) -> bytes:
        """The rest of the file. Empty where it is a pipe or the like, which is only written."""
        found = bytearray()
        while self._regular and (part := os.pread(self._file, 2**20, offset + len(found))):
            found += part
        return bytes(found)

    def _not_a_store(self) -> UsageError:
        return UsageError(
            f"{_FLAG} {str(self.path)!r} holds something else than records",
            allowed="a new file, or one that an earlier run or sweep wrote",
            next_step="give another file; this one wasn't touched",
        )

    def _check_cut(self) -> None:
        """Checks a last line without its end, which the next append completes or moves aside.

        Raises:
            UsageError: it is that of another program, or of another schema.
        """
        tail = self._read_from(self._offset)
        line = tail.rpartition(b"\n")[2]
        if row := _row(line):
            self._check_schema(row)
        elif line == tail and not self._offset and _is_foreign(line, is_cut=True):
            raise self._not_a_store()

    def _check_schema(self, row: dict[str, Any]) -> None:
        if (schema := row["schema"]) != SCHEMA:
            raise UsageError(
                f"{_FLAG} {str(self.path)!r} has records of schema {schema}, and this jaxremat knows {SCHEMA}",
                cause=f"{writer_of(schema)} wrote it",
                next_step="take that version, or another file; this one wasn't touched",
            )

    def _parse(self, line: bytes, number: int) -> tuple[Place, Record] | None:
        """The record in line `number`; None where it belongs to no trial.

        None, too, where it can't be read. That is noted.
        """
        row, where = _row(line), f"{self.path}, line {number}"
        if row is None:
            if number == 1 and _is_foreign(line):
                raise self._not_a_store()
            if line.strip():
                self.notes.append(f"{where} is no record and stays as it is: {line[:60].decode(errors='replace')!r}")
            return None
        self._check_schema(row)
        if "key" not in row:
            return None
        try:
            return msgspec.convert(row, Place), from_row(row)
        except (msgspec.ValidationError, JaxrematError) as error:
            reason = in_words(error) if isinstance(error, msgspec.ValidationError) else error.got
            self.notes.append(f"{where} isn't used and stays as it is: {reason}")
            return None


def _parsed(line: bytes) -> Any:
    """The JSON value in a line; None where there is none."""
    try:
        return parse_json(line)
    except ValueError:
        return None


def _row(line: bytes) -> dict[str, Any] | None:
    """The row in a line; None where it is something else."""
    row = _parsed(line)
    if not isinstance(row, dict) or type(row.get("schema")) is not int or not isinstance(row.get("record"), str):
        return None
    return row if row["record"] in KINDS or row["schema"] != SCHEMA else None


def _is_foreign(line: bytes, *, is_cut: bool = False) -> bool:
    """Whether a first line that is no row is that of another program.

    It isn't where it may be a row that was damaged or cut short.
    """
    return _parsed(line) is not None or not any(line.startswith(b[: len(line)] if is_cut else b) for b in _BEGINNINGS)


def _claim_byte(key: str) -> int:
    return _FIRST_CLAIM + int(hashlib.sha256(key.encode()).hexdigest()[:15], 16)

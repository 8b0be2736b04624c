"""Headroom is learnt from the right runs, kept and found again for the same device and versions, and not lost on the way."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxremat.errors import UsageError
from jaxremat.search.budget import make_budget
from jaxremat.trial.headroom import (
    NO_HEADROOM,
    Headroom,
    Seen,
    Setup,
    choose_headroom,
    headroom_file,
    learn,
    learnt,
    load,
    seen,
    setup_of,
)
from jaxremat.trial.record import TrialRecord
from tests.rejections import rejected

GIB = 2**30
LIMIT = 100 * GIB
VERSIONS = {"driver": "580.1", "jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2"}
H200 = setup_of("NVIDIA H200", VERSIONS)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def row(
    total: int, ran: str | None = "ok", peak: int | None = None, *, kind="attached", limit: int | None = LIMIT, **more
) -> TrialRecord:
    return TrialRecord(
        **{
            **dict(record="trial", model="gpt2", num_params=1, requested_policy="dots", policy="dots", target="nvidia-h200"),
            **dict(batch=8, global_batch=8, seq_len=64, loss="full", optimizer="adamw", attention="cudnn", fits=True),
            **dict(total_bytes=total, budget_bytes=LIMIT, limit_bytes=limit, ran=ran, measured_peak_bytes=peak),
            **dict(num_compiles=1, config={"target": {"kind": kind, "description": "NVIDIA H200"}}, xla_flags=None),
            **{"versions": VERSIONS, **more},
        }
    )


def ok(total: int, peak: int | None = None) -> Seen:
    return Seen(H200, total, LIMIT, peak, "ok", "")


def oom(total: int) -> Seen:
    return Seen(H200, total, LIMIT, None, "oom", "")


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_setup_is_the_device_and_what_is_between_it_and_the_bytes():
    assert Setup("NVIDIA H200", "580.1", "0.10.2", "0.10.2", "jax-cuda13-plugin 0.10.2") == H200
    assert setup_of("A", {"jax-cuda12-plugin": "1", "jax-cuda13-plugin": None}).plugin == "jax-cuda12-plugin 1"
    assert setup_of("A", {}) == Setup("A", None, None, None, None)


@pytest.mark.parametrize(
    ("record", "teaches"),
    [
        (row(90 * GIB, peak=91 * GIB), True),
        (row(50 * GIB, peak=51 * GIB), True),
        (row(49 * GIB, peak=60 * GIB), False),
        (row(90 * GIB), True),
        (row(90 * GIB, ran=None), False),
        (row(90 * GIB, ran="crashed"), False),
        (row(95 * GIB, ran="oom"), True),
        (row(LIMIT, ran="oom"), True),
        (row(LIMIT + 1, ran="oom"), False),
        (row(40 * GIB, ran="oom"), False),
        (row(90 * GIB, kind="deviceless"), False),
        (row(90 * GIB, kind="cpu", limit=None), False),
        (row(90 * GIB, total_bytes=None), False),
    ],
)
def test_who_teaches(record, teaches):
    """Steps near the limit of an attached GPU; out of memory far below it, or above it, says nothing of the compiled bytes."""
    assert (seen(record) is not None) == teaches


@pytest.mark.parametrize(
    ("found", "share"),
    [
        ([], 0),
        ([ok(90, 90)], 0),
        ([ok(90, 80)], 0),
        ([ok(80, 100)], 0.2),
        ([ok(80, 100), ok(80, 90)], 0.2),
        ([ok(90)], 0),
        ([oom(LIMIT)], 1 / LIMIT),
        ([oom(98 * GIB)], 0.02),
        ([oom(98 * GIB), ok(98 * GIB, 98 * GIB)], 0),
        ([oom(98 * GIB), ok(97 * GIB, 97 * GIB)], 0.02),
        ([ok(99 * GIB, 99 * GIB), oom(98 * GIB)], 0.02),
    ],
)
def test_what_is_learnt(found, share):
    assert learnt(found) == pytest.approx(share, abs=1e-9)


totals = st.integers(LIMIT // 2, LIMIT)


@given(st.lists(st.builds(ok, totals, totals)), st.lists(st.builds(oom, totals)))
def test_with_the_headroom_all_would_have_gone_well(ran, failed):
    """Every step within the budget has a peak within the limit, and none that ran out of memory is within it."""
    share = learnt([*ran, *failed])
    budget = make_budget(requested_bytes=None, mem_fraction=0.75, memory_bytes=LIMIT, attached=True, headroom=share)
    for one in ran:
        assert budget.num_bytes * (one.peak_bytes or 0) / one.total_bytes <= LIMIT * (1 + 1e-12)
    assert all(one.total_bytes > budget.num_bytes for one in failed)
    assert 0 <= budget.num_bytes <= LIMIT


def headroom(
    kind: Literal["attached", "cpu", "deviceless"] = "attached",
    device: str = "NVIDIA H200",
    asked: float | None = None,
    **versions: str | None,
) -> tuple[Headroom, str]:
    return choose_headroom(asked, kind, device, VERSIONS | versions)


def test_learnt_and_used_on_the_same_device_and_versions_only():
    assert headroom() == (NO_HEADROOM, "")
    assert learn([row(80 * GIB, peak=100 * GIB), row(70 * GIB, peak=70 * GIB), row(GIB, peak=9 * GIB)]) == ""
    chosen, note = headroom()
    assert (round(chosen.share, 9), note) == (0.2, "")
    assert numbers(chosen.source) == [2]
    others: list[dict[str, Any]] = [{"device": "NVIDIA H100"}, {"driver": "590.0"}, {"jax": "0.12.0"}, {"jaxlib": "0.12.0"}]
    for other in [*others, {"jax-cuda13-plugin": "0.12.0"}]:
        assert headroom(**other)[0] == NO_HEADROOM
    assert headroom(kind="cpu", device="NVIDIA H200")[0] == NO_HEADROOM
    assert headroom(asked=0.0)[0].share == 0
    chosen, _ = headroom(asked=0.1)
    assert chosen.share == 0.1
    assert "--headroom" in chosen.source


def test_without_the_device_it_is_that_of_the_same_kind_and_said():
    learn([row(80 * GIB, peak=100 * GIB)])
    chosen, _ = headroom(kind="deviceless", driver=None)
    assert chosen.source.endswith("NVIDIA H200")
    assert numbers(chosen.source) == [1, 200]
    assert headroom(kind="deviceless", device="NVIDIA B200", driver=None)[0] == NO_HEADROOM
    assert headroom(kind="deviceless", driver=None, jax="0.12.0")[0] == NO_HEADROOM


def test_deviceless_runs_teach_nothing():
    assert learn([row(80 * GIB, peak=100 * GIB, kind="deviceless")]) == ""
    assert not headroom_file().exists()


@pytest.mark.parametrize(
    ("given_", "num_bytes", "terms"),
    [
        ({"attached": True}, 98 * GIB, ["100.00 GiB", "2.00 GiB", "2.0%", "SOURCE"]),
        ({"attached": True, "in_use_bytes": GIB}, 97 * GIB, ["100.00 GiB", "1.00 GiB", "2.00 GiB", "2.0%", "SOURCE"]),
        ({}, 98 * GIB * 3 // 4, ["0.75 x 100.00 GiB", "1.50 GiB", "2.0%", "SOURCE"]),
        ({"headroom": 0.0}, 75 * GIB, ["0.75 x 100.00 GiB"]),
        ({"requested_bytes": GIB, "attached": True}, GIB, ["--budget"]),
    ],
)
def test_it_is_stated_in_the_budget_s_terms(given_, num_bytes, terms):
    """The terms name these numbers, in this order, and no others."""
    given = {
        "requested_bytes": None,
        "mem_fraction": 0.75,
        "memory_bytes": LIMIT,
        "headroom": 0.02,
        "headroom_source": "SOURCE",
    }
    budget = make_budget(**given | given_)
    assert budget.num_bytes == num_bytes
    assert re.findall(r"(?:0.75 x )?[\d.]+ GiB|[\d.]+%|SOURCE|--\w+", budget.terms) == terms


def test_damaged_lines_are_left_out_and_kept():
    """One note says how many; the good ones still count, and what is learnt next goes behind a line that was cut short."""
    learn([row(80 * GIB, peak=100 * GIB)])
    path = headroom_file()
    whole = json.loads(path.read_text())
    wrong = [json.dumps(whole | change).encode() for change in ({"schema": 2}, {"total_bytes": "x"})]
    bad = [b"no json", b"[]", b"{}", *wrong]
    path.write_bytes(path.read_bytes() + b"\n".join([*bad, b"\xff", b'{"cut short']))
    before = path.read_bytes()
    chosen, note = headroom()
    assert numbers(chosen.source) == [1]
    assert str(path) in note
    assert numbers(note.replace(str(path), "")) == [7, 8]
    assert learn([row(90 * GIB, peak=91 * GIB)]) == ""
    assert path.read_bytes().startswith(before)
    assert numbers(headroom()[0].source) == [2]


def test_a_place_that_cannot_be_written_or_read(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = tmp_path / "file" / "jaxremat" / "headroom.jsonl"
    assert str(path) in (said := learn([row(90 * GIB, peak=91 * GIB)]))
    assert "XDG_CACHE_HOME" in said
    found, note = load()
    assert found == []
    assert str(path) in note


def test_the_place(monkeypatch, tmp_path):
    assert headroom_file() == tmp_path / "cache" / "jaxremat" / "headroom.jsonl"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert headroom_file() == tmp_path / ".cache" / "jaxremat" / "headroom.jsonl"


def test_many_learn_at_once():
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda n: learn([row(90 * GIB, peak=91 * GIB, batch=n)]), range(1, 101))) == {""}
    found, note = load()
    assert (len({one.what for one in found}), note) == (100, "")


@pytest.mark.parametrize("flags", ["--headroom 1", "--headroom -0.1", "--headroom nan", "--headroom 0.1 --budget 1GiB"])
def test_bad_flags(flags):
    error = rejected(flags.split())
    assert isinstance(error, UsageError)
    assert " ".join(flags.split()[:2]) in error.got.replace(" got", "")
    assert error.next_step


def test_a_run_says_what_it_used(h100):
    """From the file to the heading, for a GPU that isn't here; --headroom 0 ignores it, and a damaged line is one note."""
    from jaxremat.chips.installed import versions
    from jaxremat.cli.command import parse_flags
    from jaxremat.session.flags import RunFlags
    from jaxremat.session.request import check_run
    from jaxremat.session.session import Session

    kind = {"target": {"kind": "attached", "description": "NVIDIA H100 80GB HBM3"}}
    learn([row(90 * GIB, peak=100 * GIB, config=kind, versions=versions() | {"driver": "580.1"})])

    def started(*argv: str) -> Session:
        return Session.of(check_run(parse_flags(RunFlags, ["--model", "tiny", "--attention", "xla", *argv])), h100)

    def budget(*argv: str) -> str:
        return next(line for line in started(*argv).heading if line.startswith("budget"))

    def terms(*argv: str) -> list[str]:
        return re.findall(r"[\d.]+ GiB|[\d.]+%|NVIDIA H100", budget(*argv))

    with_headroom = ["53.40 GiB", "79.11 GiB", "5.93 GiB", "10.0%", "NVIDIA H100"]
    assert terms() == with_headroom
    assert terms("--headroom", "0") == ["59.33 GiB", "79.11 GiB"]
    assert terms("--headroom", "0.5") == ["29.67 GiB", "79.11 GiB", "29.67 GiB", "50.0%"]
    assert terms("--budget", "1GiB") == ["1.00 GiB"]
    with headroom_file().open("a") as file:
        file.write("{" + os.linesep)
    assert terms() == with_headroom
    assert numbers(started().warnings[0])[:2] == [1, 2]

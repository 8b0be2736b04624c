"""The memory page as a file: its size, its content policy, what `--redact` hides, and that every buffer survives in it."""

import random
import re
from dataclasses import replace
from importlib.resources import files
from itertools import accumulate

import pytest

from jaxremat.errors import JaxrematError
from jaxremat.report.page import CUTS, MAX_PAGE_BYTES, PageInput, build_page, write_page
from tests.memory_maps import scanned, unrolled
from tests.page_data import data_of

DOTS = scanned()


def a_page(memory=DOTS, **fields) -> PageInput:
    return PageInput(**{"title": "gpt2", "policy": "dots", "batch": 32, "target": "h100-80gb", "memory": memory, **fields})


@pytest.mark.parametrize("memory", [DOTS, unrolled(num_layers=8, blocks=6)], ids=["plain", "deflated"])
def test_every_buffer_comes_out_as_it_went_in(memory):
    text = build_page([a_page(memory)])
    data = data_of(text)
    packed = data["pages"][0]
    column = {key: list(accumulate(values)) for key, values in packed["buffers"].items()}
    strings = data["strings"]
    names = [strings[i] for i in accumulate(packed["program"])]
    assert names == [operation.name for operation in memory.program]
    for i, b in enumerate(memory.buffers):
        prefix = names[b.first] if column["prefixed"][i] else ""
        assert prefix + strings[column["name"][i]] == b.name
        assert [strings[column[key][i]] for key in ("label", "shape", "opName", "source")] == [
            b.label,
            b.shape,
            b.op_name,
            b.source,
        ]
        numbers = [column[key][i] for key in ("bytes", "layers", "allocation", "offset", "first", "last")]
        assert numbers == [b.num_bytes, b.num_layers, b.allocation, b.offset, b.first, b.last]
        assert data["categories"][column["category"][i]] == b.category
        assert column["loop"][i] == (-1 if b.loop is None else b.loop)
    assert data["notes"] == []
    assert ("deflate" in text.split('id="data">')[1][:20]) == (memory is not DOTS)


def test_bytes_by_category_sum_to_the_total():
    packed = data_of(build_page([a_page()]))["pages"][0]
    assert sum(packed["at_peak"].values()) == sum(allocation["bytes"] for allocation in packed["allocations"])


@pytest.mark.parametrize(
    "memory", [DOTS, scanned(saved=False), unrolled(num_layers=3, blocks=2)], ids=["dots", "nothing", "deep"]
)
def test_each_category_that_is_drawn_is_in_the_legend(memory):
    """With its bytes at the peak, which may be 0, and with a colour of its own."""
    data = data_of(build_page([a_page(memory)]))
    (packed,) = data["pages"]
    drawn = {data["categories"][i] for i in accumulate(packed["buffers"]["category"])}
    assert drawn == packed["at_peak"].keys() - {"gaps"}
    assert "recompute" in drawn
    assert ("gaps" in packed["at_peak"]) == bool(packed["gaps"])
    css = (files("jaxremat.report") / "web" / "page.css").read_text("utf-8")
    assert all(f"--{category.replace(' ', '-')}: #" in css for category in (*data["categories"], "gaps"))


def test_the_holders_of_the_peak_are_rows_of_equal_layers():
    buffers = [replace(b, label=f"layers_{n}/mlp") if b.category == "residuals" else b for n, b in enumerate(DOTS.buffers)]
    data = data_of(build_page([a_page(replace(DOTS, buffers=tuple(buffers)))]))
    (packed,) = data["pages"]
    rows = {data["strings"][label]: (items, size) for label, items, size, _ in packed["holders"]}
    saved = [n for n, b in enumerate(buffers) if b.category == "residuals"]
    items, size = rows["layers_*/mlp"]
    assert sorted(items) == saved
    assert len(saved) > 2
    assert size == packed["at_peak"]["residuals"]
    assert sum(size for _, size in rows.values()) == sum(packed["at_peak"].values()) - packed["at_peak"]["gaps"]


def test_nothing_may_be_loaded_and_the_data_cannot_end_their_block():
    text = build_page([a_page(title="</title></script>{{css}}", command="<!-- </script>")])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert text.count("</script>") == 2
    assert text.count("<!--") == 0
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert "http" not in re.sub(r"http-equiv", "", text.split('id="data"')[0])


def test_random_names_that_do_not_compress_are_cut_and_it_is_said():
    rng = random.Random(0)
    buffers = tuple(replace(b, op_name="".join(rng.choices("abcdefghijklmnop", k=10_000))) for b in DOTS.buffers)
    text = build_page([a_page(replace(DOTS, buffers=buffers))])
    assert len(text.encode()) < MAX_PAGE_BYTES
    (note,) = data_of(text)["notes"]
    assert f"{CUTS[1][0]:,}" in note


@pytest.mark.full
def test_more_buffers_than_fit_leave_the_smallest_out_and_it_is_said():
    rng = random.Random(0)
    memory = unrolled(num_layers=8, blocks=16)
    noisy = tuple(
        replace(b, name=rng.randbytes(60).hex(), label=rng.randbytes(60).hex(), op_name=rng.randbytes(200).hex())
        for b in memory.buffers
    )
    text = build_page([a_page(replace(memory, buffers=noisy))])
    assert len(text.encode()) < MAX_PAGE_BYTES
    data = data_of(text)
    drawn = list(accumulate(data["pages"][0]["buffers"]["bytes"]))
    assert f"{len(noisy) - len(drawn):,}" in data["notes"][-1]
    assert max(b.num_bytes for b in noisy) in drawn
    assert sum(data["pages"][0]["at_peak"].values()) == memory.total_bytes


def test_redacting_hides_sources_and_absolute_paths_but_no_scopes():
    first, *rest = DOTS.buffers
    spy = replace(
        first, op_name="jit(f)/while/body/dot at /home/me/secret code/a.py:3", label=r"C:\Users\me\b.py", source="/x/y.py:1"
    )
    memory = replace(DOTS, buffers=(spy, *rest), host_buffers=(replace(spy, name="file:///home/me/c.py"),))
    page = a_page(memory, command="python -m jaxremat explain --page ~/private/report.html --out=/home/me/o")
    plain, hidden = build_page([page]), build_page([page], redact=True)
    for secret in ("secret", "Users", "y.py", "c.py", "private", "/home", "transformer.py"):
        assert secret in plain
        assert secret not in hidden
    assert "jit(f)/while/body/dot at [path]" in hidden
    assert "jit(train_step)/jit(main)/" in hidden
    assert (len(data_of(plain)["notes"]), len(data_of(hidden)["notes"])) == (0, 1)


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path):
    with pytest.raises(JaxrematError) as caught:
        write_page(tmp_path / "missing" / "page.html", [a_page()])
    assert "--page" in caught.value.got
    assert "missing" in caught.value.got

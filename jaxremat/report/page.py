"""One HTML file that draws the memory of compiled steps. It needs no network.

The page's HTML, style and scripts are in `web/`. This module packs the memory maps as the page's data.

A buffer's name can have any text, so the page never treats a name as HTML or as code:
- The data are JSON in a block that no browser executes, with `<`, `>` and `&` escaped.
- The scripts show names as text only.
- The page's content security policy allows the file's own script and style, by their hashes, and nothing else.
"""

import base64
import hashlib
import html
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxremat.answer.savings import Saving
from jaxremat.errors import JaxrematError
from jaxremat.system.files import named_by, write_whole
from jaxremat.trial.record import SuggestionRecord
from jaxremat.xla.buffers import CATEGORIES, Allocation, Buffer, MemoryMap, attribution, held, holders
from jaxremat.xla.hlo import plain_scope
from jaxremat.xla.step_facts import Finding

#: The most bytes that a page may take. Mail and issue trackers accept a file of this size, and a browser opens it at once.
MAX_PAGE_BYTES = 1_000_000
#: Up to this many characters the JSON isn't compressed, so that the data of a small page can be read in its source.
PLAIN_BYTES = 64_000
#: How much stays: characters of each text, and share of the buffers. Tried in this order until the page is small enough.
CUTS = ((10_000, 1.0), (1_000, 1.0), (200, 1.0), (200, 0.5), (100, 0.25), (60, 0.1), (20, 0.02))
_SCRIPTS = ("data.js", "theme.js", "scene.js", "viewer.js", "panels.js", "trace.js", "page.js")
#: An absolute path, with the line number after it. The names of JAX's scopes contain slashes too, but don't start with one.
_PATH = re.compile(r"""(?<![\w)\]}.*-])(?:file://|~|[A-Za-z]:)?[/\\](?:[^/\\\n"'()<>,;|]+[/\\])*[^/\\\s"'()<>,;|]*""")


@dataclass(frozen=True)
class PageInput:
    """One compiled step on a page.

    Attributes:
        title: what was compiled, such as `gpt2`.
        policy: the rematerialization policy, as typed.
        batch: sequences per step. None if the step has no batch.
        target: the GPU that the step was compiled for.
        memory: the step's buffers.
        budget_bytes: the bytes that a step may use, drawn as a line. With None no line is drawn.
        versions: the versions of the libraries that compiled the step, by name.
        command: the command that makes this page again. It may be empty.
        savings: the bytes and saved seconds of the buffers that have them. With None the page has no such columns.
        seconds: the predicted seconds of a step at each position of the program. Empty where the target's speed isn't known.
        interval: how much longer a real step may take, as shares: (-0.16, 0.16) is 16 % shorter to 16 % longer.
        findings: what the lint found.
        fits_instead: changes of the flags under which the step fits, if it doesn't.
    """

    title: str
    policy: str
    batch: int | None
    target: str
    memory: MemoryMap
    budget_bytes: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    savings: Sequence[Saving] | None = None
    seconds: Sequence[float] = ()
    interval: tuple[float, float] | None = None
    findings: Sequence[Finding] = ()
    fits_instead: Sequence[SuggestionRecord] = ()


class _Texts:
    """A table that has each text of a page once, so that data can refer to it by number.

    Calling it with a text returns the text's number.

    Attributes:
        limit: the most characters of a text. The end of a longer text is cut off.
        redact: whether absolute paths are replaced by `[path]`.
        table: the texts as the page shows them, each with its number.
        known: the texts before they were cut and redacted, each with its number.
        num_cut: how many times a text was cut.
    """

    def __init__(self, limit: int, redact: bool):
        self.limit, self.redact = limit, redact
        self.table: dict[str, int] = {}
        self.known: dict[str, int] = {}
        self.num_cut = 0

    def clean(self, text: str) -> str:
        text = text.encode(errors="replace").decode()  # a lone surrogate can't be encoded as UTF-8
        if self.redact:
            text = _PATH.sub("[path]", text)
        if len(text) > self.limit:
            self.num_cut += 1
            return text[: self.limit] + "…"
        return text

    def __call__(self, text: str) -> int:
        if text not in self.known:
            self.known[text] = self.table.setdefault(self.clean(text), len(self.table))
        return self.known[text]


def write_page(path: Path, pages: Sequence[PageInput], *, redact: bool = False) -> int:
    """Writes one HTML file that shows `pages`. A reader can compare several steps in the page.

    A page that would be too large gets shorter texts first. If that isn't enough, its smallest buffers are left out. The
    page says what was cut or left out.

    Args:
        path: the file. An existing file is overwritten.
        pages: the compiled steps, at least one.
        redact: leave out the source lines of buffers, and write `[path]` for absolute paths in every other text.

    Returns:
        The file's size in bytes, less than `MAX_PAGE_BYTES`.

    Raises:
        JaxrematError: the file can't be written, or the page is too large even with the strongest cut of `CUTS`.
        ValueError: `pages` is empty.
    """
    text = build_page(pages, redact=redact)
    with named_by("--page", path, "give another file; the rows are printed above"):
        write_whole(path, text)
    return len(text.encode())


def build_page(pages: Sequence[PageInput], *, redact: bool = False) -> str:
    """The HTML text of the page. `write_page` says what the arguments mean."""
    if not pages:
        raise ValueError("a page shows at least one step")
    for limit, share in CUTS:
        text = _assemble(_pack(pages, limit, share, redact), _Texts(200, redact).clean(pages[0].title))
        if len(text.encode()) < MAX_PAGE_BYTES:
            return text
    raise JaxrematError(
        f"{len(pages)} steps are too much for one page of {MAX_PAGE_BYTES:,} bytes",
        next_step="compare fewer policies in a page",
    )


def _assemble(data: dict[str, Any], title: str) -> str:
    web = files("jaxremat.report") / "web"
    css, *scripts = ((web / name).read_text("utf-8") for name in ("page.css", *_SCRIPTS))
    script = "\n".join(scripts)
    script_hash, css_hash = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, css))
    policy = (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{css_hash}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "title": html.escape(f"{title}: memory"), "css": css, "js": script, "data": _embed(data)}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], (web / "page.html").read_text("utf-8"))


def _embed(data: dict[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"))
    if len(text) > PLAIN_BYTES:
        text = json.dumps({"deflate": base64.b64encode(zlib.compress(text.encode(), 9)).decode()})
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _pack(pages: Sequence[PageInput], limit: int, share: float, redact: bool) -> dict[str, Any]:
    texts = _Texts(limit, redact)
    packed = [_pack_page(page, texts, share) for page in pages]
    left_out = sum(len(_drawn(page.memory, 1.0)) - len(_drawn(page.memory, share)) for page in pages)
    constants = sum(a.num_bytes for page in pages for a in page.memory.allocations if a.kind == "constant")
    notes = [
        ("source lines and absolute paths are left out", redact),
        (f"{constants:,} bytes of constants belong to the program: they are in no total and not drawn", constants),
        (f"{texts.num_cut:,} long texts are cut to {limit:,} characters", texts.num_cut),
        (f"the {left_out:,} smallest buffers are left out of so large a page; the bytes by category count them", left_out),
    ]
    applying = [note for note, applies in notes if applies]
    return {"categories": list(CATEGORIES), "notes": applying, "pages": packed, "strings": list(texts.table)}


def _pack_page(page: PageInput, texts: _Texts, share: float) -> dict[str, Any]:
    memory = page.memory
    buffers = _drawn(memory, share)
    index = {buffer.name: i for i, buffer in enumerate(buffers)}
    place = {id(buffer): i for i, buffer in enumerate(buffers)}
    live = [(buffer, size) for buffer, size in held(memory, memory.peak) if id(buffer) in place]
    savings = page.savings and [(index[s.buffer], s.num_bytes, s.cost_s) for s in page.savings if s.buffer in index]
    return {
        **{name: texts.clean(getattr(page, name)) for name in ("title", "policy", "target", "command")},
        "batch": page.batch,
        "budget": page.budget_bytes,
        "versions": {texts.clean(key): texts.clean(value) for key, value in page.versions.items()},
        "peak": memory.peak,
        "at_peak": _legend(memory, buffers),
        "holders": [
            (
                texts(one.label),
                [place[id(b)] for b in one.buffers],
                one.num_bytes,
                texts(plain_scope(one.buffers[0].op_name)),
            )
            for one in holders(live)
        ],
        "program": _deltas(texts(operation.name) for operation in memory.program),
        "phases": memory.phases,
        "loops": [asdict(loop) | {"name": texts.clean(loop.name)} for loop in memory.loops],
        "allocations": [{"number": a.number, "bytes": a.num_bytes, "kind": a.kind} for a in _allocations(memory)],
        "gaps": [(gap.allocation, gap.offset, gap.num_bytes) for gap in memory.gaps],
        "host": [(*map(texts.clean, (b.label, b.name)), b.num_bytes, texts.clean(b.shape)) for b in memory.host_buffers],
        "savings": savings,
        "nanoseconds": [round(1e9 * seconds) for seconds in page.seconds],
        "interval": page.interval,
        "findings": [(*map(texts.clean, (one.rule, one.evidence, one.remedy)), one.num_bytes) for one in page.findings],
        "fits_instead": [(texts.clean(one.flags), one.total_bytes, one.step_s) for one in page.fits_instead],
        "buffers": _columns(buffers, memory, texts),
    }


def _legend(memory: MemoryMap, drawn: Sequence[Buffer]) -> dict[str, int]:
    """The bytes at the peak of each category that is drawn, or that has some there."""
    at_peak = {category: size for category, size in attribution(memory).items() if size}
    return dict.fromkeys((buffer.category for buffer in drawn), 0) | at_peak


def _allocations(memory: MemoryMap) -> list[Allocation]:
    return [allocation for allocation in memory.allocations if allocation.kind != "constant"]


def _drawn(memory: MemoryMap, share: float) -> list[Buffer]:
    """The largest `share` of the buffers, in the order of the memory map.

    They are at least 100 where there are as many.

    Constants are left out: they belong to the program, and XLA's total doesn't count them.
    """
    drawn = {allocation.number for allocation in _allocations(memory)}
    buffers = [buffer for buffer in memory.buffers if buffer.allocation in drawn]
    num = max(min(len(buffers), 100), int(share * len(buffers)))
    largest = {id(buffer) for buffer in sorted(buffers, key=lambda buffer: -buffer.num_bytes)[:num]}
    return [buffer for buffer in buffers if id(buffer) in largest]


def _columns(buffers: Sequence[Buffer], memory: MemoryMap, texts: _Texts) -> dict[str, list[int]]:
    """Each field of all buffers, as the differences between neighbouring buffers.

    Most differences are small numbers, which compress well. The values 5, 6, 6, 8 become 5, 1, 0, 2.
    """
    makers = [memory.program[b.first].name if memory.program else "" for b in buffers]
    suffixes = [b.name.removeprefix(maker) for b, maker in zip(buffers, makers, strict=True)]
    columns: dict[str, Iterable[int]] = {
        "prefixed": (suffix != b.name for b, suffix in zip(buffers, suffixes, strict=True)),
        "name": map(texts, suffixes),
        "category": (CATEGORIES.index(b.category) for b in buffers),
        "label": (texts(b.label) for b in buffers),
        "bytes": (b.num_bytes for b in buffers),
        "layers": (b.num_layers for b in buffers),
        **{name: [getattr(b, name) for b in buffers] for name in ("allocation", "offset", "first", "last")},
        "loop": (-1 if b.loop is None else b.loop for b in buffers),
        "shape": (texts(b.shape) for b in buffers),
        "opName": (texts(b.op_name) for b in buffers),
        "source": (texts("" if texts.redact else b.source) for b in buffers),
    }
    return {name: _deltas(values) for name, values in columns.items()}


def _deltas(values: Iterable[int]) -> list[int]:
    return [after - before for before, after in pairwise((0, *map(int, values)))]

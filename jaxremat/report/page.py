"""The memory of compiled steps over their programs, as one HTML file that needs no network.

The page's own parts lie in `web/`; here the maps are packed for it. Names are data: they travel as JSON in a block that no
browser executes, with `<`, `>` and `&` escaped, and the page shows them as text alone. Its content security policy allows this
file's own script and style by their hashes and nothing else.
"""

import base64
import hashlib
import html
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxremat.answer.savings import Saving
from jaxremat.errors import JaxrematError
from jaxremat.files import named_by, write_whole
from jaxremat.xla.buffers import CATEGORIES, Buffer, MemoryMap, attribution, held

#: Bytes that a page may take: what mail and issue trackers accept without a thought, and a browser opens at once.
MAX_PAGE_BYTES = 1_000_000
#: Up to here the JSON stays as it is, so that a small page can be read without unpacking.
PLAIN_BYTES = 64_000
#: How much is kept, tried in this order until the page is small enough: characters of each text, share of the buffers.
CUTS = ((10_000, 1.0), (1_000, 1.0), (200, 1.0), (200, 0.5), (100, 0.25), (60, 0.1), (20, 0.02))
_SCRIPTS = ("data.js", "theme.js", "scene.js", "viewer.js", "panels.js", "page.js")
#: An absolute path, with the line behind it. JAX's scopes hold slashes too, but none at their start.
_PATH = re.compile(r"""(?<![\w)\]}.*-])(?:file://|~|[A-Za-z]:)?[/\\](?:[^/\\\n"'()<>,;|]+[/\\])*[^/\\\s"'()<>,;|]*""")


@dataclass(frozen=True)
class PageInput:
    """One compiled step on a page.

    Attributes:
        title: what was compiled, `gpt2`.
        policy: the rematerialization policy, as typed.
        batch: sequences a step; None where that means nothing.
        target: the GPU it was compiled for.
        memory: its buffers.
        budget_bytes: the bytes that a step may use; None draws no line.
        versions: of what compiled it, name to version.
        command: that makes this page again; may be empty.
        savings: by buffer; None leaves the columns away.
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


class _Texts:
    """A table of the texts of a page, each once and cut to `limit` characters; paths hidden if `redact`."""

    def __init__(self, limit: int, redact: bool):
        self.limit, self.redact = limit, redact
        self.table: dict[str, int] = {}
        self.known: dict[str, int] = {}
        self.num_cut = 0

    def clean(self, text: str) -> str:
        text = text.encode(errors="replace").decode()  # a lone surrogate is no text
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
    """Writes one HTML file that shows `pages`; more than one can be compared in it.

    Args:
        path: the file, overwritten.
        pages: at least one.
        redact: leave out the source lines of buffers, and put `[path]` for absolute paths in every other text.

    Returns:
        The file's size in bytes, less than `MAX_PAGE_BYTES`. Where that takes it, long texts are cut, and then the smallest
        buffers left out; the page says so.

    Raises:
        JaxrematError: the file can't be written, or even the least of these steps is too much for one page.
        ValueError: `pages` is empty.
    """
    text = build_page(pages, redact=redact)
    with named_by("--page", path, "give a file in a folder that exists"):
        write_whole(path, text)
    return len(text.encode())


def build_page(pages: Sequence[PageInput], *, redact: bool = False) -> str:
    """The text of the page; see `write_page`."""
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
    sources = {"script-src": script, "style-src": css}
    hashes = {key: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for key, text in sources.items()}
    policy = "; ".join(
        [
            "default-src 'none'",
            *(f"{key} 'sha256-{value}'" for key, value in hashes.items()),
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
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
        (
            f"the {left_out:,} smallest buffers are left out to keep the page small; the bytes by category count them",
            left_out,
        ),
    ]
    return {
        "categories": list(CATEGORIES),
        "notes": [note for note, applies in notes if applies],
        "pages": packed,
        "strings": list(texts.table),
    }


def _pack_page(page: PageInput, texts: _Texts, share: float) -> dict[str, Any]:
    memory = page.memory
    buffers = _drawn(memory, share)
    index = {buffer.name: i for i, buffer in enumerate(buffers)}
    place = {id(buffer): i for i, buffer in enumerate(buffers)}
    savings = page.savings and [(index[s.buffer], s.num_bytes, s.cost_s) for s in page.savings if s.buffer in index]
    return {
        "title": texts.clean(page.title),
        "policy": texts.clean(page.policy),
        "batch": page.batch,
        "target": texts.clean(page.target),
        "budget": page.budget_bytes,
        "versions": {texts.clean(key): texts.clean(value) for key, value in page.versions.items()},
        "command": texts.clean(page.command),
        "peak": memory.peak,
        "held": attribution(memory),
        "holders": [(place[id(buffer)], size) for buffer, size in held(memory, memory.peak) if id(buffer) in place],
        "program": _deltas(texts(operation.name) for operation in memory.program),
        "phases": memory.phases,
        "loops": [
            {
                "name": texts.clean(loop.name),
                "first": loop.first,
                "last": loop.last,
                "trip_count": loop.trip_count,
                "parent": loop.parent,
            }
            for loop in memory.loops
        ],
        "allocations": [
            {"number": a.number, "bytes": a.num_bytes, "kind": a.kind} for a in memory.allocations if a.kind != "constant"
        ],
        "gaps": [(gap.allocation, gap.offset, gap.num_bytes) for gap in memory.gaps],
        "host": [
            (texts.clean(b.label), texts.clean(b.name), b.num_bytes, texts.clean(b.shape)) for b in memory.host_buffers
        ],
        "savings": savings,
        "buffers": _columns(buffers, memory, texts),
    }


def _drawn(memory: MemoryMap, share: float) -> list[Buffer]:
    """The largest `share` of the buffers, in the map's order. Constants belong to the program, not to the total: none of them."""
    constants = {allocation.number for allocation in memory.allocations if allocation.kind == "constant"}
    buffers = [buffer for buffer in memory.buffers if buffer.allocation not in constants]
    num = max(min(len(buffers), 100), int(share * len(buffers)))
    kept = {id(buffer) for buffer in sorted(buffers, key=lambda buffer: -buffer.num_bytes)[:num]}
    return [buffer for buffer in buffers if id(buffer) in kept]


def _columns(buffers: Sequence[Buffer], memory: MemoryMap, texts: _Texts) -> dict[str, list[int]]:
    """Each field of all buffers as differences between neighbours; most are small then, and pack well."""
    made_by = [memory.program[b.first].name if memory.program else "" for b in buffers]
    prefixed = [bool(maker) and b.name.startswith(maker) for b, maker in zip(buffers, made_by, strict=True)]
    suffixes = [
        b.name.removeprefix(maker) if whole else b.name for b, maker, whole in zip(buffers, made_by, prefixed, strict=True)
    ]
    columns: dict[str, Iterable[int]] = {
        "prefixed": prefixed,
        "name": map(texts, suffixes),
        "category": (CATEGORIES.index(b.category) for b in buffers),
        "label": (texts(b.label) for b in buffers),
        "bytes": (b.num_bytes for b in buffers),
        "layers": (b.num_layers for b in buffers),
        "allocation": (b.allocation for b in buffers),
        "offset": (b.offset for b in buffers),
        "first": (b.first for b in buffers),
        "last": (b.last for b in buffers),
        "loop": (-1 if b.loop is None else b.loop for b in buffers),
        "shape": (texts(b.shape) for b in buffers),
        "opName": (texts(b.op_name) for b in buffers),
        "source": (texts("" if texts.redact else b.source) for b in buffers),
    }
    return {name: _deltas(values) for name, values in columns.items()}


def _deltas(values: Iterable[int]) -> list[int]:
    return [after - before for before, after in pairwise((0, *map(int, values)))]

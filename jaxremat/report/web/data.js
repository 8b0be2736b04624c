"use strict";
// What page.py packed: string tables, columns of integers (differences between neighbours), and how bytes are written.

const LIMIT = 400; // characters of one text on the screen; the data hold more

async function readData() {
  const data = JSON.parse(document.getElementById("data").textContent);
  if (!("deflate" in data)) return data;
  if (typeof DecompressionStream === "undefined")
    throw new Error("This browser is too old to unpack the page's data: it has no DecompressionStream (2023).");
  const bytes = Uint8Array.from(atob(data.deflate), (char) => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

const sums = (differences) => {
  let total = 0;
  return Float64Array.from(differences, (difference) => (total += difference));
};

// One compiled step: columns over its buffers, the gaps at its peak last, in a category of their own.
function unpack(packed, data) {
  const { strings, categories } = data;
  const program = Array.from(sums(packed.program), (i) => strings[i]);
  const column = Object.fromEntries(Object.entries(packed.buffers).map(([key, values]) => [key, sums(values)]));
  const num = column.first.length;
  const map = { ...packed, categories: [...categories, "gaps"], program, num, ...column };
  const named = (key, otherwise) => (i) => (i < num ? strings[column[key][i]] : otherwise);
  map.nameOf = (i) =>
    i >= num ? "gap" : column.prefixed[i] ? program[column.first[i]] + strings[column.name[i]] : strings[column.name[i]];
  map.labelOf = named("label", "no live buffer covers these bytes at the peak");
  map.opNameOf = named("opName", "");
  map.sourceOf = named("source", "");
  map.shapeOf = named("shape", "");
  map.loopOf = (i) => (i < num && column.loop[i] >= 0 ? packed.loops[column.loop[i]] : null);
  map.holders = packed.holders.map(([label, items, bytes, module]) => ({
    label: strings[label],
    items,
    bytes,
    module: strings[module],
  }));
  map.categoryOf = (i) => map.categories[map.category[i]];
  addHoles(map);
  stack(map);
  map.inUse = bytesInUse(map);
  const took = (first, last) => packed.nanoseconds.slice(first, last + 1).reduce((all, one) => all + one, 0) / 1e6;
  map.stepMs = took(0, packed.nanoseconds.length);
  map.phases = packed.phases.map(([phase, first, last]) => [phase, first, last, took(first, last)]);
  return map;
}

// A gap reaches as far to both sides of the peak as its bytes stay unused.
function addHoles(map) {
  const extents = map.gaps.map(([allocation, offset, bytes]) => {
    let [first, last] = [0, map.program.length - 1];
    for (let i = 0; i < map.num; i++) {
      const meets =
        map.allocation[i] === allocation && map.offset[i] < offset + bytes && offset < map.offset[i] + map.bytes[i];
      if (meets && map.last[i] < map.peak) first = Math.max(first, map.last[i] + 1);
      if (meets && map.first[i] > map.peak) last = Math.min(last, map.first[i] - 1);
    }
    return [first, last];
  });
  const grow = (key, values) => (map[key] = Float64Array.from([...map[key], ...values]));
  grow(
    "allocation",
    map.gaps.map((gap) => gap[0]),
  );
  grow(
    "offset",
    map.gaps.map((gap) => gap[1]),
  );
  grow(
    "bytes",
    map.gaps.map((gap) => gap[2]),
  );
  grow(
    "first",
    extents.map(([first]) => first),
  );
  grow(
    "last",
    extents.map(([, last]) => last),
  );
  grow(
    "category",
    map.gaps.map(() => map.categories.length - 1),
  );
}

// The program lies below, then arguments, like with like; then constants and outputs; the arena of temporaries on top.
function stack(map) {
  const kinds = ["program", "argument", "constant", "output", "temp"];
  const category = new Map();
  for (let i = 0; i < map.num; i++) if (!category.has(map.allocation[i])) category.set(map.allocation[i], map.category[i]);
  const order = map.allocations.map((_, i) => i);
  const rank = (i) => kinds.indexOf(map.allocations[i].kind) * 100 + (category.get(map.allocations[i].number) ?? 99);
  order.sort((a, b) => rank(a) - rank(b) || a - b);
  const base = new Map();
  map.sections = [];
  map.total = 0;
  for (const i of order) {
    const { number, bytes, kind } = map.allocations[i];
    if (map.sections.at(-1)?.kind !== kind) map.sections.push({ kind, low: map.total, high: map.total });
    base.set(number, map.total);
    map.total += bytes;
    map.sections.at(-1).high = map.total;
  }
  map.low = map.offset.map((offset, i) => base.get(map.allocation[i]) + offset);
}

// The bytes of the whole axis that live buffers cover, at each position. Buffers may share bytes, so each stretch of the axis
// between two of their ends counts how many buffers cover it.
function bytesInUse(map) {
  const buffers = Array.from({ length: map.num }, (_, i) => i);
  const ends = [...new Set(buffers.flatMap((i) => [map.low[i], map.low[i] + map.bytes[i]]))].sort((a, b) => a - b);
  const place = new Map(ends.map((end, i) => [end, i]));
  const covers = new Int32Array(ends.length);
  const [born, dead] = [0, 1].map(() => map.program.map(() => []));
  for (const i of buffers) {
    born[map.first[i]].push(i);
    dead[map.last[i] + 1]?.push(i);
  }
  let bytes = 0;
  const cover = (i, change) => {
    const last = place.get(map.low[i] + map.bytes[i]);
    for (let at = place.get(map.low[i]); at < last; at++) {
      const before = covers[at];
      covers[at] += change;
      if (!before !== !covers[at]) bytes += change * (ends[at + 1] - ends[at]);
    }
  };
  return Float64Array.from(map.program, (_, position) => {
    for (const i of dead[position]) cover(i, -1);
    for (const i of born[position]) cover(i, 1);
    return bytes;
  });
}

const grouped = (number) => Math.round(number).toLocaleString("en-US");

// Ties go to the even digit, as in Python: sizes are often powers of two, and a page should show what the commands print.
const number = (value, digits) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits, roundingMode: "halfEven" });
const inGib = (bytes) => number(bytes / 2 ** 30, 3);
const few = (bytes) => (bytes && inGib(bytes) === "0.000" ? "< 0.001" : inGib(bytes));
const gib = (bytes) => `${Math.abs(bytes) >= 2 ** 30 ? number(bytes / 2 ** 30, 2) : few(bytes)} GiB`;
const ms = (milliseconds) => `${number(milliseconds, milliseconds < 1 ? 3 : milliseconds < 100 ? 2 : 1)} ms`;
const exact = (bytes) => `${gib(bytes)} (${grouped(bytes)} bytes)`;
const cut = (text, limit = LIMIT) =>
  text.length > limit ? `${text.slice(0, limit)}… (${grouped(text.length)} characters)` : text;
const loopText = (loop) => `${cut(loop.name, 40)} × ${loop.trip_count ?? "?"}`;
const KIND_TEXT = { program: "program", argument: "arguments", constant: "constants", output: "outputs", temp: "temporaries" };

// What is known about item i, as pairs of a term and a text.
function facts(map, i) {
  const loop = map.loopOf(i);
  const life =
    i < map.num
      ? `${grouped(map.first[i])} to ${grouped(map.last[i])} of ${grouped(map.program.length - 1)}`
      : `unused from ${grouped(map.first[i])} to ${grouped(map.last[i])}`;
  return [
    ["name", map.nameOf(i)],
    ["label", map.labelOf(i)],
    ["category", map.categoryOf(i)],
    ["size", exact(map.bytes[i])],
    ["shape", map.shapeOf(i)],
    ["layers", i < map.num && map.layers[i] > 1 ? `${grouped(map.layers[i])}, stacked` : ""],
    ["life", life],
    ["loop", loop ? loopText(loop) : ""],
    ["offset", `${grouped(map.offset[i])} in allocation ${map.allocation[i]}`],
    ["op_name", map.opNameOf(i)],
    ["source", map.sourceOf(i)],
  ].filter(([, text]) => text);
}

// Strings are far fewer than buffers: search them, then take the buffers that have one.
function matching(map, wanted) {
  const hits = new Map();
  const has = (text) => {
    if (!hits.has(text)) hits.set(text, text.toLowerCase().includes(wanted));
    return hits.get(text);
  };
  const found = [];
  for (let i = 0; i < map.num; i++)
    if (map.nameOf(i).toLowerCase().includes(wanted) || has(map.labelOf(i)) || has(map.opNameOf(i)) || has(map.sourceOf(i)))
      found.push(i);
  return found.sort((a, b) => map.bytes[b] - map.bytes[a] || map.first[a] - map.first[b]);
}

// What stands beside and below the picture, made from a map: lists and tables.

const ROWS = 200; // of a table or a list at first

// Everything that is shown goes through here: text stays text.
function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "onclick") made.addEventListener("click", value);
    else if (key === "colour") made.style.background = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function fillFacts(place, pairs, limit) {
  const list = place.tagName === "DL" ? place : node("dl");
  list.replaceChildren(...pairs.flatMap(([term, text]) => [node("dt", {}, term), node("dd", {}, cut(text, limit))]));
  if (list !== place) place.replaceChildren(list);
}

const head = (columns) =>
  node("tr", {}, ...columns.map(([text, kind]) => node("th", { scope: "col", ...(kind && { class: kind }) }, text)));
const swatch = (category) =>
  category === "gaps"
    ? node("span", { class: "swatch gaps" })
    : node("span", { class: "swatch", colour: `var(--${category.replaceAll(" ", "-")}, var(--other))` });
const titled = (page) =>
  cut([page.title, `policy ${page.policy}`, page.batch ? `batch ${page.batch}` : ""].filter(Boolean).join(", "), 300);
const labelled = (map, i) => map.labelOf(i) || map.nameOf(i);
const cell = (text) => node("td", { class: "number" }, text);

// A row of a list: a button with a swatch, a name and a number.
function choice(attributes, category, name, value) {
  const parts = [...(category ? [swatch(category)] : []), node("span", { class: "name" }, ...name)];
  const button = node("button", { type: "button", ...attributes }, ...parts, node("span", { class: "number" }, value));
  return node("li", {}, button);
}

function legendRows(map, chosen, choose) {
  const rows = map.categories.flatMap((category, i) => {
    const bytes = map.at_peak[category];
    const attributes = { "aria-pressed": chosen === i, title: `${grouped(bytes ?? 0)} bytes at the peak`, onclick: () => choose(i) };
    return category in map.at_peak ? [choice(attributes, category, [category], few(bytes))] : [];
  });
  const total = [node("span", { class: "name" }, "total"), node("span", { class: "number" }, inGib(map.total))];
  return [...rows, node("li", { class: "sum" }, ...total)];
}

// What is drawn beside the buffers.
function lineRows(map, budget) {
  const drawn = { peak: map.program.length, total: 1, budget, use: map.program.length, folded: map.loops.length };
  const words = { use: "bytes in use", folded: "buffers of folded loops" };
  const shown = Object.keys(drawn).filter((name) => drawn[name]);
  return shown.map((name) => node("li", {}, node("span", { class: `swatch mark ${name}` }), words[name] ?? name));
}

// What the lint found, each with its remedy; and what fits in place of a step that doesn't.
function findingRows(page) {
  const row = (title, bytes, ...parts) => {
    const size = bytes ? [node("span", { class: "number" }, gib(bytes))] : [];
    return node("details", {}, node("summary", {}, node("span", { class: "name" }, cut(title)), ...size), ...parts);
  };
  const paste = (text) => node("pre", {}, cut(text, 2000));
  const step = (seconds) => (seconds === null ? [] : [node("p", {}, `step ${ms(1e3 * seconds)}`)]);
  return [
    ...page.fits_instead.map(([flags, bytes, seconds]) => row(`fits: ${flags}`, bytes, ...step(seconds), paste(flags))),
    ...page.findings.map(([rule, evidence, remedy, bytes]) =>
      row(rule, bytes, node("p", {}, cut(evidence, 2000)), paste(remedy)),
    ),
  ];
}

function loopRows(scene, toggle) {
  return scene.map.loops.map((loop, i) => {
    const folded = scene.folded[i];
    const count = scene.hidden.get(i);
    const hidden = count === undefined ? "folded within another" : `${grouped(count)} buffers folded`;
    const name = `${"\u2003".repeat(scene.depths[i])}${folded ? "+" : "−"} ${loopText(loop)}`;
    return choice({ "aria-expanded": !folded, onclick: () => toggle(i) }, null, [name], folded ? hidden : "unfolded");
  });
}

// A window of what was found, around the current one.
function matchRows(map, found, current, go) {
  const first = Math.max(0, Math.min(current - ROWS / 2, found.length - ROWS));
  const rows = found.slice(first, first + ROWS).map((item, i) => {
    const name = cut(map.nameOf(item), 80);
    const attributes = { "aria-current": first + i === current, title: name, onclick: () => go(first + i) };
    return choice(
      attributes,
      map.categoryOf(item),
      [cut(labelled(map, item), 80), node("small", {}, name)],
      gib(map.bytes[item]),
    );
  });
  const rest = found.length - rows.length;
  return rest > 0 ? [...rows, node("li", {}, `and ${grouped(rest)} more: ↑ ↓ go through all`)] : rows;
}

function table(place, caption, heads, rows) {
  const parts = [node("thead", {}, head(heads)), node("tbody", {}, ...rows)];
  place.replaceChildren(node("caption", {}, node("span", {}, caption)), ...parts);
}

// Who holds the peak, the buffers of equal layers in one row: `reach` shows them in the picture.
// `order` is the column that the rows are sorted by and its direction; `sort` chooses another.
function holdersTable(place, map, { limit, wanted, order, sort }, reach) {
  const savings = map.savings && new Map(map.savings.map(([item, ...values]) => [item, values]));
  const sum = (items, which) => {
    const known = items.filter((item) => savings.has(item)).map((item) => savings.get(item)[which]);
    return known.length ? known.reduce((all, one) => all + one) : null;
  };
  const or = (value, text) => (value === null ? "–" : text(value));
  const columns = [
    ["buffer", ({ items, label }) => link(map, items, label, reach), "", ({ label }) => label],
    [
      "category",
      ({ items: [item] }) => node("span", {}, swatch(map.categoryOf(item)), map.categoryOf(item)),
      "tight",
      ({ items: [item] }) => map.categoryOf(item),
    ],
    ["GiB", ({ bytes }) => few(bytes), "number", ({ bytes }) => bytes],
    ["bytes", ({ bytes }) => grouped(bytes), "number wide", ({ bytes }) => bytes],
    ["module", ({ module }) => cut(module, 80), "wide", ({ module }) => module],
    ["shape", ({ items: [item] }) => cut(map.shapeOf(item), 60), "tight wide", ({ items: [item] }) => map.shapeOf(item)],
    ["life", ({ items }) => lifeOf(map, items), "number wide", ({ items: [item] }) => map.first[item]],
    ["loop", ({ items: [item] }) => inLoop(map, item), "tight wide", ({ items: [item] }) => inLoop(map, item)],
    ["saves, GiB", ({ items }) => or(sum(items, 0), few), "number", ({ items }) => sum(items, 0) ?? -1],
    ["costs, ms", ({ items }) => or(sum(items, 1), (s) => number(1e3 * s, 3)), "number", ({ items }) => sum(items, 1) ?? -1],
    ["source", ({ items: [item] }) => cut(map.sourceOf(item), 120), "wide", ({ items: [item] }) => map.sourceOf(item)],
  ].filter(([name]) => savings || !/^(saves|costs)/.test(name));
  const row = (holder) => columns.map(([, text, kind]) => node("td", kind ? { class: kind } : {}, text(holder)));
  const at = map.program.length ? ` (${cut(map.program[map.peak], 60)})` : "";
  const count = map.holders.reduce((all, { items }) => all + items.length, 0);
  const caption = [
    `${grouped(count)} buffers hold the peak, position ${grouped(map.peak)}${at}, ${order.column} ${order.down ? "descending" : "ascending"}.`,
    count > map.holders.length ? "Those of equal layers are one row, with the shape of each." : "",
    "Each byte is counted once, and gaps not at all.",
    savings ? "Saves and costs: bytes that rematting the buffer frees at most, and the predicted time a step to compute it again." : "",
  ];
  const heads = columns.map(([name, , kind]) => {
    const isOrder = order.column === name;
    const text = isOrder ? `${name} ${order.down ? "▼" : "▲"}` : name;
    return [node("button", { type: "button", "aria-pressed": isOrder, onclick: () => sort(name) }, text), kind];
  });
  const has = (text) => text.toLowerCase().includes(wanted);
  const found = map.holders.filter(
    ({ items: [item], label, module }) => has(label) || has(module) || has(map.nameOf(item)) || has(map.categoryOf(item)),
  );
  const key = columns.find(([name]) => name === order.column)?.[3] ?? (({ bytes }) => bytes);
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
  found.sort((a, b) => (order.down ? -1 : 1) * compare(key(a), key(b)));
  const rows = found.slice(0, limit).map((holder) => node("tr", {}, ...row(holder)));
  table(place, caption.filter(Boolean).join(" "), heads, rows);
  return found.length;
}

const inLoop = (map, item) => (map.loopOf(item) ? loopText(map.loopOf(item)) : "");

const lifeOf = (map, items) =>
  `${grouped(Math.min(...items.map((i) => map.first[i])))}–${grouped(Math.max(...items.map((i) => map.last[i])))}`;

function link(map, items, label, reach) {
  const attributes = { type: "button", title: cut(map.nameOf(items[0]), 200), onclick: () => reach(items) };
  return node("button", attributes, cut(label, 120) + (items.length > 1 ? ` × ${grouped(items.length)}` : ""));
}

function hostTable(place, host) {
  const rows = host.map(([label, name, bytes, shape]) =>
    node(
      "tr",
      {},
      node("td", {}, cut(label || name, 120)),
      cell(few(bytes)),
      cell(grouped(bytes)),
      node("td", {}, cut(shape, 60)),
    ),
  );
  table(
    place,
    "In pinned host memory, apart from the device's bytes",
    [["buffer"], ["GiB", "number"], ["bytes", "number"], ["shape"]],
    rows,
  );
}

// Two maps by category, and the second less the first.
function differencesTable(place, names, pair) {
  const both = pair.map((map) => ({ ...map.at_peak, total: map.total }));
  const keys = [...pair[0].categories.filter((category) => both.some((one) => one[category])), "total"];
  const difference = (key) => {
    const change = (both[1][key] ?? 0) - (both[0][key] ?? 0);
    const size = inGib(Math.abs(change));
    return `${size === "0.000" ? "" : change > 0 ? "+" : "−"}${size}`;
  };
  const row = (name, texts) => node("tr", {}, node("th", { scope: "row" }, name), ...texts.map(cell));
  const rows = both.map((one, i) =>
    row(
      cut(names[i], 40),
      keys.map((key) => few(one[key] ?? 0)),
    ),
  );
  const heads = keys.map((key) =>
    node("th", { scope: "col", class: "number" }, ...(key === "total" ? [] : [swatch(key)]), key),
  );
  const top = node("tr", {}, node("th", { scope: "col" }, "GiB at the peak"), ...heads);
  place.replaceChildren(node("thead", {}, top), node("tbody", {}, ...rows, row("right − left", keys.map(difference))));
}

// The canvases beside each other under their titles and a legend, as a PNG file.
function savePng(canvases, titles, categories) {
  const theme = themeNow();
  const ratio = window.devicePixelRatio || 1;
  const above = 58;
  const width = canvases.reduce((sum, canvas) => sum + canvas.width, 0);
  const size = { width, height: canvases[0].height + above * ratio };
  const picture = Object.assign(document.createElement("canvas"), size);
  const context = picture.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, size.width, size.height);
  let x = 0;
  canvases.forEach((canvas, i) => {
    const shown = { width: canvas.width / ratio, height: canvas.height / ratio };
    context.fillStyle = theme.ink;
    context.font = theme.font.replace(/^[\d.]+/, "15");
    context.fillText(shorten(context, titles[i], shown.width - 24), x + 12, 20);
    context.drawImage(canvas, x, above, shown.width, shown.height);
    x += shown.width;
  });
  context.font = theme.font;
  x = 12;
  for (const category of categories) {
    context.fillStyle = theme.fillOf(category);
    context.fillRect(x, 34, 11, 11);
    context.fillStyle = theme.ink;
    context.fillText(category, x + 15, 44);
    x += context.measureText(category).width + 29;
  }
  picture.toBlob((blob) => download(blob, "png"), "image/png");
}

function download(blob, kind) {
  const name = `${document.title.replace(/[^\w.-]+/g, "-").slice(0, 80)}.${kind}`;
  const made = node("a", { href: URL.createObjectURL(blob), download: name });
  made.click();
  setTimeout(() => URL.revokeObjectURL(made.href), 10_000);
}

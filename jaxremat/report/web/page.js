// The page around the canvases: tabs, search, legend, loops, tables, theme, PNG and print.

let DATA = null;
const at = (id) => document.getElementById(id);
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

const head = (columns) => node("tr", {}, ...columns.map(([text, number]) => node("th", { scope: "col", ...(number && { class: "number" }) }, text)));
const swatch = (category) =>
  category === "holes" ? node("span", { class: "swatch holes" }) : node("span", { class: "swatch", colour: `var(--${category.replaceAll(" ", "-")}, var(--other))` });
const titled = (page) => cut([page.title, `policy ${page.policy}`, page.batch ? `batch ${page.batch}` : ""].filter(Boolean).join(", "), 300);
const labelled = (map, i) => map.labelOf(i) || map.nameOf(i);
const options = (select, chosen) => select.replaceChildren(...DATA.pages.map((page, i) => node("option", i === chosen ? { value: i, selected: "" } : { value: i }, cut(titled(page), 90))));

function main(data) {
  DATA = data;
  const maps = data.pages.map((page) => unpack(page, data));
  const marks = new Marks();
  const state = { shown: 0, map: null, found: [], current: -1, rows: ROWS };
  const limits = data.pages.map((page) => page.budget);
  let syncing = false;

  const events = {
    pin: (item) => pin(item),
    changed: (viewer, cause) => cause === "fold" && showLoops(),
    at: showPosition,
  };
  const viewer = new Viewer(at("canvas"), at("tooltip"), marks, events);
  const pair = ["left", "right"].map(
    (side) => new Viewer(at(`canvas-${side}`), at("tooltip"), new Marks(), { pin: alike, changed: follow, at: () => {} }),
  );

  function entitle() {
    const { map } = state;
    const page = data.pages[state.shown];
    at("title").textContent = titled(page);
    const parts = map.sections.filter(({ low, high }) => inGib(high - low) !== "0.000").map(({ kind, low, high }) => `${KIND_TEXT[kind]} ${gib(high - low)}`).join(" + ");
    const host = page.host.length ? `; pinned host memory ${gib(page.host.reduce((sum, row) => sum + row[2], 0))}` : "";
    const budget = page.budget ? `; budget ${gib(page.budget)}${map.total > page.budget ? ", exceeded" : ""}` : "";
    at("summary").textContent = cut(`${page.target}: total ${gib(map.total)}${parts && ` = ${parts}`}${budget}${host}`, 600);
  }

  function show(i) {
    Object.assign(state, { shown: i, map: maps[i], rows: ROWS });
    const { map } = state;
    const page = data.pages[i];
    entitle();
    marks.categoryOf = (item) => map.category[item];
    Object.assign(marks, { matches: null, category: null, pinned: undefined });
    viewer.show(new Scene(map, page.budget));
    at("canvas").setAttribute("aria-label", `${grouped(map.num)} buffers of device memory over ${grouped(map.program.length)} positions of the program, ${gib(map.total)} in all. The tab "At the peak" has the same as a table.`);
    search();
    pin(undefined);
    showLegend();
    showLoops();
    showHolders();
    showHost();
    showAbout();
  }

  function pin(item) {
    marks.pinned = item;
    at("pinned").hidden = item === undefined;
    if (item !== undefined) fillFacts(at("pinned-facts"), facts(state.map, item), LIMIT);
    viewer.redraw();
  }

  function showPosition(position) {
    at("where").hidden = position === undefined;
    at("keys").hidden = !at("where").hidden;
    if (position === undefined) return;
    const { map } = state;
    const phase = map.phases.find(([, first, last]) => first <= position && position <= last)?.[0] ?? "";
    const words = [`position ${grouped(position)}`, phase, `${gib(viewer.scene.coveredAt(position))} in use`, cut(map.program[position], 100)];
    at("where").textContent = words.filter(Boolean).join(" · ");
  }

  function showLegend() {
    const { held, categories } = state.map;
    const row = (category, bytes) => {
      const index = categories.indexOf(category);
      const toggle = () => {
        marks.category = marks.category === index ? null : index;
        showLegend();
        viewer.redraw();
      };
      const parts = [swatch(category), node("span", { class: "name" }, category), node("span", { class: "number" }, few(bytes))];
      return node("li", {}, node("button", { type: "button", "aria-pressed": marks.category === index, title: `${grouped(bytes)} bytes`, onclick: toggle }, ...parts));
    };
    const rows = categories.filter((category) => held[category]).map((category) => row(category, held[category]));
    const sum = node("li", { class: "sum" }, node("span", { class: "name" }, "total"), node("span", { class: "number" }, inGib(state.map.total)));
    at("legend").replaceChildren(...rows, sum);
  }

  function showLoops() {
    const { scene } = viewer;
    at("loops-section").hidden = !state.map.loops.length;
    const row = (loop, i) => {
      const folded = scene.folded[i];
      const count = scene.hidden.get(i);
      const note = folded ? (count === undefined ? "folded within another" : `${grouped(count)} buffers folded`) : "unfolded";
      const text = `${"\u2003".repeat(scene.depths[i])}${folded ? "+" : "−"} ${loopText(loop)}`;
      return node("li", {}, node("button", { type: "button", "aria-expanded": !folded, onclick: () => viewer.toggle(i) }, node("span", { class: "name" }, text), node("span", { class: "number" }, note)));
    };
    at("loops").replaceChildren(...state.map.loops.map(row));
  }

  function search() {
    const wanted = at("search").value.trim().toLowerCase();
    state.current = -1;
    state.found = wanted ? matching(state.map, wanted) : [];
    marks.matches = wanted ? new Set(state.found) : null;
    const folded = state.found.filter((item) => viewer.scene.hiddenBy[item] >= 0).length;
    const of = `of ${grouped(state.map.num)} buffers${folded ? `, ${grouped(folded)} of them folded` : ""}`;
    at("found").textContent = wanted ? `${grouped(state.found.length)} ${of}` : "";
    for (const id of ["previous", "next"]) at(id).disabled = !state.found.length;
    listFound();
    viewer.redraw();
  }

  function listFound() {
    const first = Math.max(0, Math.min(state.current - ROWS / 2, state.found.length - ROWS));
    const rows = state.found.slice(first, first + ROWS).map((item, i) => {
      const parts = [swatch(state.map.categoryOf(item)), node("span", { class: "name" }, cut(labelled(state.map, item), 80), node("small", {}, cut(state.map.nameOf(item), 80))), node("span", { class: "number" }, gib(state.map.bytes[item]))];
      return node("li", {}, node("button", { type: "button", "aria-current": first + i === state.current, title: cut(state.map.nameOf(item), 100), onclick: () => go(first + i) }, ...parts));
    });
    const rest = state.found.length - rows.length;
    at("matches").replaceChildren(...rows, ...(rest > 0 ? [node("li", {}, `and ${grouped(rest)} more: ↑ ↓ go through all`)] : []));
    at("matches").querySelector('[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
  }

  function go(i) {
    if (!state.found.length) return;
    state.current = (i + state.found.length) % state.found.length;
    const item = state.found[state.current];
    viewer.reveal(item);
    pin(item);
    listFound();
    at("found").textContent = `${grouped(state.current + 1)} of ${grouped(state.found.length)} matches`;
  }

  function showHolders() {
    const { map } = state;
    const savings = map.savings && new Map(map.savings.map(([item, bytes, cost]) => [item, [bytes, cost]]));
    const heads = [["buffer"], ["category"], ["GiB", 1], ["bytes", 1], ["shape"], ["life", 1], ["loop"], ...(savings ? [["saves, GiB", 1], ["costs, ms", 1]] : []), ["source"]];
    const rows = map.holders.slice(0, state.rows).map(([item, bytes]) => {
      const [saved, cost] = savings?.get(item) ?? [];
      const loop = map.loopOf(item);
      const link = node("button", { type: "button", title: cut(map.nameOf(item), 200), onclick: () => reach(item) }, cut(labelled(map, item), 120));
      const money = savings ? [[saved === undefined ? "–" : inGib(saved), "number"], [cost === undefined ? "–" : number(1e3 * cost, 3), "number"]] : [];
      const cells = [[link], [node("span", {}, swatch(map.categoryOf(item)), map.categoryOf(item)), "tight"], [inGib(bytes), "number"], [grouped(bytes), "number"], [cut(map.shapeOf(item), 60), "tight"], [`${grouped(map.first[item])}–${grouped(map.last[item])}`, "number"], [loop ? loopText(loop) : "", "tight"], ...money, [cut(map.sourceOf(item), 120)]];
      return node("tr", {}, ...cells.map(([content, kind]) => node("td", kind ? { class: kind } : {}, content)));
    });
    const words = `${grouped(map.holders.length)} buffers hold the peak, position ${grouped(map.peak)}${map.program.length ? ` (${cut(map.program[map.peak], 60)})` : ""}, largest first. Each byte is counted once, and holes not at all.`;
    const note = savings ? " Saves and costs: what rematting the buffer would free at the peak, and the predicted time to compute it again." : "";
    at("holders").replaceChildren(node("caption", {}, words + note), node("thead", {}, head(heads)), node("tbody", {}, ...rows));
    at("more").hidden = map.holders.length <= state.rows;
    at("more").textContent = `Show all ${grouped(map.holders.length)}`;
  }

  function showHost() {
    const { host } = data.pages[state.shown];
    at("host").hidden = !host.length;
    const rows = host.map(([label, name, bytes, shape]) => node("tr", {}, ...[label || name, inGib(bytes), grouped(bytes), shape].map((text, i) => node("td", i === 1 || i === 2 ? { class: "number" } : {}, cut(text, 120)))));
    at("host").replaceChildren(node("caption", {}, "In pinned host memory, apart from the device's bytes"), node("thead", {}, head([["buffer"], ["GiB", 1], ["bytes", 1], ["shape"]])), node("tbody", {}, ...rows));
  }

  function showAbout() {
    const page = data.pages[state.shown];
    fillFacts(at("about-facts"), [["command", page.command], ...Object.entries(page.versions), ...data.notes.map((note) => ["note", note])].filter(([, text]) => text), 2000);
  }

  // From the table to the picture.
  function reach(item) {
    openTab("timeline");
    requestAnimationFrame(() => {
      viewer.reveal(item);
      pin(item);
      at("canvas").focus();
    });
  }

  // Two policies: one scale in bytes, and the same share of the program.
  function compare() {
    if (maps.length < 2) return;
    const sides = pair.map((_, i) => +at(["which-left", "which-right"][i]).value);
    syncing = true;
    sides.forEach((side, i) => {
      const scene = new Scene(maps[side], limits[side]);
      pair[i].marks.categoryOf = (item) => maps[side].category[item];
      pair[i].show(scene);
      pair[i].canvas.setAttribute("aria-label", `${titled(data.pages[side])}: ${gib(maps[side].total)}; the table below compares the two`);
    });
    const high = Math.max(...pair.map((one) => one.scene.whole().high));
    pair.forEach((one) => {
      one.scene.whole = () => ({ left: 0, right: 1, low: 0, high });
      one.reset();
    });
    syncing = false;
    const both = sides.map((side) => ({ name: cut(data.pages[side].policy, 40), total: maps[side].total, ...maps[side].held }));
    const shown = [...maps[0].categories.filter((category) => both.some((one) => one[category])), "total"];
    const cells = (texts) => texts.map((text) => node("td", { class: "number" }, text));
    const rows = both.map((one) => node("tr", {}, node("th", { scope: "row" }, one.name), ...cells(shown.map((key) => few(one[key] ?? 0)))));
    const changes = shown.map((key) => {
      const change = (both[1][key] ?? 0) - (both[0][key] ?? 0);
      const size = inGib(Math.abs(change));
      return `${size === "0.000" ? "" : change > 0 ? "+" : "−"}${size}`;
    });
    const heads = shown.map((key) => node("th", { scope: "col", class: "number" }, ...(key === "total" ? [key] : [swatch(key), key])));
    const top = node("tr", {}, node("th", { scope: "col" }, "GiB at the peak"), ...heads);
    const bottom = node("tr", {}, node("th", { scope: "row" }, "right − left"), ...cells(changes));
    at("differences").replaceChildren(node("thead", {}, top), node("tbody", {}, ...rows, bottom));
    at("title").textContent = `${both[0].name} against ${both[1].name}`;
    at("summary").textContent = `${gib(both[0].total)} against ${gib(both[1].total)}, drawn at one scale. A click marks the buffers of that label in both.`;
  }

  // In a comparison a click marks the buffers of the same label on both sides.
  function alike(item, from) {
    const label = item === undefined ? null : labelled(from.scene.map, item);
    for (const one of pair) {
      const { map } = one.scene;
      const same = (i) => labelled(map, i) === label;
      one.marks.matches = label === null ? null : new Set([...Array(map.num).keys()].filter(same));
      one.redraw();
    }
  }

  function follow(from) {
    if (syncing) return;
    syncing = true;
    const other = pair[0] === from ? pair[1] : pair[0];
    if (other.scene) other.setView({ ...from.view });
    syncing = false;
  }

  function openTab(name) {
    for (const tab of document.querySelectorAll('[role="tab"]')) {
      const open = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", open);
      tab.tabIndex = open ? 0 : -1;
      at(tab.getAttribute("aria-controls")).hidden = !open;
    }
    at("tooltip").hidden = true;
    at("png").disabled = name === "peak";
    at("choose").hidden = maps.length < 2 || name === "compare";
    if (name === "compare") compare();
    else entitle();
  }

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    at("theme").textContent = name === "dark" ? "Light" : "Dark";
    themeChanged();
    for (const one of [viewer, ...pair]) one.redraw();
  }

  // The picture with its title and legend, as a file.
  function savePng() {
    const canvases = at("timeline").hidden ? pair.map((one) => one.canvas) : [viewer.canvas];
    const theme = themeNow();
    const ratio = window.devicePixelRatio || 1;
    const [head, width] = [58 * ratio, canvases.reduce((sum, canvas) => sum + canvas.width, 0)];
    const picture = Object.assign(document.createElement("canvas"), { width, height: canvases[0].height + head });
    const context = picture.getContext("2d");
    context.fillStyle = theme.paper;
    context.fillRect(0, 0, picture.width, picture.height);
    context.scale(ratio, ratio);
    let left = 0;
    for (const canvas of canvases) {
      const sides = canvases.length > 1 ? pair.map((_, i) => data.pages[+at(["which-left", "which-right"][i]).value]) : [data.pages[state.shown]];
      context.fillStyle = theme.ink;
      context.font = theme.font.replace(/^[\d.]+/, "15");
      context.fillText(shorten(context, titled(sides[canvases.indexOf(canvas)]), canvas.width / ratio - 24), left + 12, 20);
      context.drawImage(canvas, left, head / ratio, canvas.width / ratio, canvas.height / ratio);
      left += canvas.width / ratio;
    }
    context.font = theme.font;
    let x = 12;
    for (const category of state.map.categories.filter((one) => maps.some((map) => map.held[one]))) {
      context.fillStyle = theme.fills[state.map.categories.indexOf(category)];
      context.fillRect(x, 34, 11, 11);
      context.fillStyle = theme.ink;
      context.fillText(category, x + 15, 44);
      x += context.measureText(category).width + 29;
    }
    picture.toBlob((blob) => {
      const link = node("a", { href: URL.createObjectURL(blob), download: `${document.title.replace(/[^\w.-]+/g, "-").slice(0, 80)}.png` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    }, "image/png");
  }

  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input, select");
    if (event.key === "Escape") {
      at("search").value = "";
      marks.category = null;
      search();
      pin(undefined);
      showLegend();
      viewer.hovered(undefined);
      if (typing) at("canvas").focus();
    } else if (event.key === "Enter" && event.target === at("search")) {
      go(state.current + (event.shiftKey ? -1 : 1));
    } else if (typing || at("timeline").hidden) {
      return;
    } else if (event.key === "/") {
      event.preventDefault();
      at("search").focus();
    } else if (event.key === "n" || event.key === "p") {
      go(state.current + (event.key === "n" ? 1 : -1));
    } else if (event.target === document.body) {
      viewer.key(event);
    }
  }

  const tabs = [...document.querySelectorAll('[role="tab"]')].filter((tab) => tab.id !== "tab-compare" || maps.length > 1);
  at("tab-compare").hidden = maps.length < 2;
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => openTab(tab.getAttribute("aria-controls")));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.stopPropagation();
      const next = tabs[(i + step + tabs.length) % tabs.length];
      openTab(next.getAttribute("aria-controls"));
      next.focus();
    });
  });
  at("choose").hidden = maps.length < 2;
  options(at("which"), 0);
  options(at("which-left"), 0);
  options(at("which-right"), 1);
  at("which").addEventListener("change", (event) => show(+event.target.value));
  for (const id of ["which-left", "which-right"]) at(id).addEventListener("change", compare);
  let waiting;
  at("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(search, 80);
  });
  at("next").addEventListener("click", () => go(state.current + 1));
  at("previous").addEventListener("click", () => go(state.current - 1));
  at("unpin").addEventListener("click", () => pin(undefined));
  at("more").addEventListener("click", () => ((state.rows = Infinity), showHolders()));
  for (const [id, folded] of [["fold-all", true], ["unfold-all", false]])
    at(id).addEventListener("click", () => {
      viewer.scene.foldAll(folded);
      viewer.setView(viewer.view, "fold");
    });
  at("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  at("png").addEventListener("click", savePng);
  at("print").addEventListener("click", () => window.print());
  document.addEventListener("keydown", key);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  setTheme(dark.matches ? "dark" : "light");
  let before;
  window.addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    setTheme("light");
    for (const one of [viewer, ...pair]) one.draw();
  });
  window.addEventListener("afterprint", () => setTheme(before));
  show(0);
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
    if (map.nameOf(i).toLowerCase().includes(wanted) || has(map.labelOf(i)) || has(map.opNameOf(i)) || has(map.sourceOf(i))) found.push(i);
  return found.sort((a, b) => map.bytes[b] - map.bytes[a] || map.first[a] - map.first[b]);
}

readData()
  .then(main)
  .catch((error) => {
    at("failure").textContent = `This page cannot show its data: ${error.message}`;
    at("failure").hidden = false;
    throw error;
  });

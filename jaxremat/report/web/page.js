// The page around the canvases: tabs, search, legend, loops, tables, theme, PNG and print.

let DATA = null;
const at = (id) => document.getElementById(id);
const options = (select, chosen) =>
  select.replaceChildren(
    ...DATA.pages.map((page, i) =>
      node("option", i === chosen ? { value: i, selected: "" } : { value: i }, cut(titled(page), 90)),
    ),
  );

function main(data) {
  DATA = data;
  const maps = data.pages.map((page) => unpack(page, data));
  const marks = new Marks();
  const state = { shown: 0, map: null, found: [], current: -1, rows: ROWS, order: { column: "GiB", down: true } };
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
    const parts = map.sections
      .filter(({ low, high }) => inGib(high - low) !== "0.000")
      .map(({ kind, low, high }) => `${KIND_TEXT[kind]} ${gib(high - low)}`)
      .join(" + ");
    const host = page.host.length ? `; pinned host memory ${gib(page.host.reduce((sum, row) => sum + row[2], 0))}` : "";
    const [shorter, longer] = page.interval?.map((share) => Math.round(100 * share)) ?? [];
    const off = longer === undefined ? "" : -shorter === longer ? ` ±${longer} %` : ` (−${-shorter} to +${longer} %)`;
    const time = map.stepMs ? `; step ${ms(map.stepMs)}${off}, predicted` : "";
    const budget = page.budget ? `; budget ${gib(page.budget)}${map.total > page.budget ? ", exceeded" : ""}` : "";
    at("summary").textContent = cut(`${page.target}: total ${gib(map.total)}${parts && ` = ${parts}`}${budget}${host}${time}`, 600);
  }

  function show(i) {
    Object.assign(state, { shown: i, map: maps[i], rows: ROWS });
    const { map } = state;
    const page = data.pages[i];
    entitle();
    marks.categoryOf = (item) => map.category[item];
    Object.assign(marks, { matches: null, category: null, pinned: undefined });
    viewer.show(new Scene(map, page.budget, byTime()));
    const words = [
      `${grouped(map.num)} buffers of device memory over ${grouped(map.program.length)} positions of the program,`,
      `${gib(map.total)} in all. The tab "At the peak" has those of the peak as a table.`,
    ];
    at("canvas").setAttribute("aria-label", words.join(" "));
    search();
    pin(undefined);
    showLegend();
    showLoops();
    showFindings();
    showHolders();
    showHost();
    showAbout();
  }

  const byTime = () => at("axis").value === "time";

  function showFindings() {
    const rows = findingRows(data.pages[state.shown]);
    at("findings").hidden = !rows.length;
    at("findings-list").replaceChildren(...rows);
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
    const holds = (i) => map.loops[i].first <= position && position <= map.loops[i].last;
    const folds = viewer.scene.outermost.filter(holds);
    const words = [
      `position ${grouped(position)}`,
      phase,
      `${gib(map.inUse[position])} in use`,
      map.nanoseconds[position] ? `${ms(map.nanoseconds[position] / 1e6)} predicted` : "",
      cut(map.program[position], 100),
      folds.length ? `folded here: ${folds.map((i) => loopText(map.loops[i])).join(", ")}, unfolds by a click above` : "",
    ];
    at("where").textContent = words.filter(Boolean).join(" · ");
  }

  function showLegend() {
    const choose = (category) => {
      marks.category = marks.category === category ? null : category;
      showLegend();
      viewer.redraw();
    };
    at("legend").replaceChildren(...legendRows(state.map, marks.category, choose));
    at("lines").replaceChildren(...lineRows(state.map, data.pages[state.shown].budget));
  }

  function showLoops() {
    at("loops-section").hidden = !state.map.loops.length;
    at("loops").replaceChildren(...loopRows(viewer.scene, (loop) => viewer.toggle(loop)));
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
    at("matches").replaceChildren(...matchRows(state.map, state.found, state.current, go));
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
    const { rows, order } = state;
    const sort = (column) => {
      state.order = { column, down: order.column === column ? !order.down : column === "GiB" || column === "bytes" };
      showHolders();
    };
    const wanted = at("filter").value.trim().toLowerCase();
    const num = holdersTable(at("holders"), state.map, { limit: rows, wanted, order, sort }, reach);
    at("filtered").textContent = wanted ? `${grouped(num)} of ${grouped(state.map.holders.length)} rows` : "";
    at("more").hidden = num <= state.rows;
    at("more").textContent = `Show all ${grouped(num)}`;
  }

  function showHost() {
    const { host } = data.pages[state.shown];
    at("host").hidden = !host.length;
    hostTable(at("host"), host);
  }

  function showAbout() {
    const { command, versions } = data.pages[state.shown];
    const notes = data.notes.map((note) => ["note", note]);
    const pairs = [["command", command], ...Object.entries(versions), ...notes];
    fillFacts(
      at("about-facts"),
      pairs.filter(([, text]) => text),
      2000,
    );
  }

  // From the table to the picture: the first buffer of a row is pinned, the others are marked with it.
  function reach(items) {
    openTab("timeline");
    search();
    if (items.length > 1) marks.matches = new Set(items);
    requestAnimationFrame(() => {
      viewer.reveal(items[0]);
      pin(items[0]);
      at("canvas").focus();
    });
  }

  const chosenSides = () => ["which-left", "which-right"].map((id) => +at(id).value);

  // Two policies: one scale in bytes, and the same share of the program.
  function compare() {
    if (maps.length < 2) return;
    const sides = chosenSides();
    syncing = true;
    sides.forEach((side, i) => {
      const scene = new Scene(maps[side], limits[side], byTime());
      pair[i].marks.categoryOf = (item) => maps[side].category[item];
      pair[i].show(scene);
      pair[i].canvas.setAttribute(
        "aria-label",
        `${titled(data.pages[side])}: ${gib(maps[side].total)}; the table below compares the two`,
      );
    });
    const high = Math.max(...pair.map((one) => one.whole().high));
    pair.forEach((one) => {
      one.scene.whole = () => ({ left: 0, right: 1, low: 0, high });
      one.reset();
    });
    syncing = false;
    const names = sides.map((side) => data.pages[side].policy);
    const shown = sides.map((side) => maps[side]);
    differencesTable(at("differences"), names, shown);
    at("title").textContent = names.map((name) => cut(name, 60)).join(" against ");
    const sizes = shown.map((map) => gib(map.total)).join(" against ");
    at("summary").textContent = `${sizes}, drawn at one scale. A click marks the buffers of that label in both.`;
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
    for (const id of ["png", "axis"]) at(id).disabled = name === "peak";
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

  function saveShown() {
    const compared = at("timeline").hidden;
    const sides = compared ? chosenSides() : [state.shown];
    const drawn = (category) => sides.some((side) => category in maps[side].at_peak);
    const canvases = compared ? pair.map((one) => one.canvas) : [viewer.canvas];
    savePng(
      canvases,
      sides.map((side) => titled(data.pages[side])),
      state.map.categories.filter(drawn),
    );
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
      if (pair[0].scene) alike(undefined, pair[0]);
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
  for (const [id, folded] of [
    ["fold-all", true],
    ["unfold-all", false],
  ])
    at(id).addEventListener("click", () => {
      viewer.scene.foldAll(folded);
      viewer.setView(viewer.view, "fold");
    });
  at("theme").addEventListener("click", () =>
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
  );
  at("png").addEventListener("click", saveShown);
  at("trace").addEventListener("click", () =>
    download(new Blob([JSON.stringify(traceOf(state.map, titled(data.pages[state.shown])))], { type: "application/json" }), "json"),
  );
  at("choose-axis").hidden = !maps.some((map) => map.stepMs);
  at("axis").addEventListener("change", () => {
    const { pinned } = marks;
    viewer.show(new Scene(state.map, limits[state.shown], byTime()));
    pin(pinned);
    showLoops();
    if (!at("compare").hidden) compare();
  });
  at("filter").addEventListener("input", showHolders);
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

readData()
  .then(main)
  .catch((error) => {
    at("failure").textContent = `This page cannot show its data: ${error.message}`;
    at("failure").hidden = false;
    throw error;
  });

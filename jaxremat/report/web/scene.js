// A map as a picture: where each buffer lies for a given fold of the loops and a given view, drawing it, and what is at a point.

const MARGIN = { left: 62, right: 20, top: 44, bottom: 38 };
const STRIP = { height: 64, least: 340 }; // below the plot: the bytes in use, on canvases of at least so many pixels
const LARGE = 0.04; // of the total: what is as large at the peak has a label, however short it lives
const TAG = 17; // pixels of a line's tag, with the line
const FOLDED_SHARE = 0.05; // of the program's width, for a folded loop

class Scene {
  constructor(map, budget, byTime = false) {
    Object.assign(this, { map, budget, byTime: byTime && map.stepMs > 0 });
    this.order = Uint32Array.from(map.first.keys()).sort(
      (a, b) => map.first[a] - map.first[b] || map.bytes[b] - map.bytes[a],
    );
    const holdsPeak = (loop) => loop.first <= map.peak && map.peak <= loop.last;
    this.folded = map.loops.map((loop) => !holdsPeak(loop)); // the first question is who holds the peak
    this.depths = map.loops.map((loop) => this.ancestors(loop).length);
    this.layOut();
  }

  ancestors(loop) {
    const found = [];
    for (let at = loop; at.parent !== null; at = this.map.loops[at.parent]) found.push(at.parent);
    return found;
  }

  // The outermost folded loops, the program's width with them narrow, and what they hide.
  layOut() {
    const { map } = this;
    const num = map.program.length;
    this.outermost = [...map.loops.keys()].filter(
      (i) => this.folded[i] && !this.ancestors(map.loops[i]).some((a) => this.folded[a]),
    );
    const widths = this.byTime ? Float64Array.from(map.nanoseconds) : new Float64Array(num).fill(1);
    for (const i of this.byTime ? [] : this.outermost) {
      const { first, last } = map.loops[i];
      widths.fill(Math.min(1, Math.max(2, FOLDED_SHARE * num) / (last - first + 1)), first, last + 1);
    }
    this.edges = new Float64Array(num + 1);
    for (let p = 0; p < num; p++) this.edges[p + 1] = this.edges[p] + widths[p];
    const width = this.edges[num] || 1;
    this.edges = this.edges.map((edge) => edge / width);
    this.hiddenBy = new Int32Array(map.first.length).fill(-1);
    this.hidden = new Map(this.outermost.map((i) => [i, 0]));
    this.dotted = [];
    for (const i of this.outermost) this.fold(i);
  }

  fold(i) {
    const { map } = this;
    const { first, last } = map.loops[i];
    const inside = [];
    for (let b = 0; b < map.num; b++) {
      if (map.first[b] < first || map.last[b] > last) continue;
      this.hiddenBy[b] = i;
      inside.push(b);
    }
    this.hidden.set(i, inside.length);
    inside.sort((a, b) => map.low[a] - map.low[b]);
    let [low, high] = [0, 0];
    for (const b of inside) {
      if (map.low[b] > high) {
        if (high > low) this.dotted.push([first, last, low, high]);
        low = map.low[b];
      }
      high = Math.max(high, map.low[b] + map.bytes[b]);
    }
    if (high > low) this.dotted.push([first, last, low, high]);
  }

  toggle(i) {
    this.folded[i] = !this.folded[i];
    this.layOut();
  }

  foldAll(folded) {
    this.folded.fill(folded);
    this.layOut();
  }

  // Unfolds whatever hides item b.
  reveal(b) {
    const hides = (loop) => loop.first <= this.map.first[b] && this.map.last[b] <= loop.last;
    this.map.loops.forEach((loop, i) => hides(loop) && (this.folded[i] = false));
    this.layOut();
  }

  // The total, or the budget if it is above and not far above.
  most() {
    const { total } = this.map;
    return this.budget && this.budget < 1.6 * total ? Math.max(total, this.budget) : total;
  }

  // The whole program over all bytes, in a plot of so many pixels: above the highest line there is room for its tag.
  whole(height) {
    return { left: 0, right: 1, low: 0, high: Math.max(1.04, 1 + (TAG + 2) / (height || Infinity)) * this.most() || 1 };
  }

  positionAt(share) {
    let [low, high] = [0, this.edges.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.edges[middle] <= share) low = middle;
      else high = middle;
    }
    return low;
  }

  // Screen coordinates within a plot area for a view.
  frame(view, plot) {
    const perShare = plot.width / (view.right - view.left);
    const perByte = plot.height / (view.high - view.low);
    return {
      x: (position) => plot.x + (this.edges[position] - view.left) * perShare,
      y: (bytes) => plot.y + plot.height - (bytes - view.low) * perByte,
    };
  }

  // The item under a point, the last born first; or the loop whose handle it is, or the kind of allocation beside the plot.
  at(view, plot, px, py) {
    const { map } = this;
    const share = view.left + ((px - plot.x) / plot.width) * (view.right - view.left);
    const bytes = view.low + ((plot.y + plot.height - py) / plot.height) * (view.high - view.low);
    if (py < plot.y && py >= 0) {
      const handle = this.handles(view, plot).find(
        (h) => px >= h.x && px <= h.x + h.width && py >= h.y && py <= h.y + h.height,
      );
      return handle ? { loop: handle.loop } : {};
    }
    if (px > plot.x + plot.width && bytes >= 0)
      return { section: map.sections.find(({ low, high }) => low <= bytes && bytes < high) };
    if (px < plot.x || px > plot.x + plot.width || py > plot.y + plot.height || share < 0 || share > 1) return {};
    const position = this.positionAt(share);
    let item;
    for (let k = 0; k < this.order.length; k++) {
      const b = this.order[k];
      if (map.first[b] > position) break;
      if (map.last[b] >= position && map.low[b] <= bytes && bytes < map.low[b] + map.bytes[b] && this.hiddenBy[b] < 0)
        item = b;
    }
    return { item, position, bytes };
  }

  handles(view, plot) {
    const { x } = this.frame(view, plot);
    const shown = (i) => !this.ancestors(this.map.loops[i]).some((a) => this.folded[a]);
    return this.map.loops.flatMap((loop, i) => {
      if (!shown(i)) return [];
      const left = Math.max(plot.x, x(loop.first));
      const right = Math.min(plot.x + plot.width, x(loop.last + 1));
      return right > left
        ? [{ loop: i, x: left, y: 21 + 6 * this.depths[i], width: right - left, height: 18 - 6 * this.depths[i] }]
        : [];
    });
  }

  draw(ctx, view, size, theme, marks) {
    const plot = plotArea(size);
    const frame = this.frame(view, plot);
    ctx.clearRect(0, 0, size.width, size.height);
    ctx.fillStyle = theme.paper;
    ctx.fillRect(0, 0, size.width, size.height);
    ctx.font = theme.font;
    ctx.textBaseline = "middle";
    this.drawGrid(ctx, view, plot, frame, theme);
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.x, plot.y, plot.width, plot.height);
    ctx.clip();
    this.drawBlocks(ctx, view, plot, frame, theme, marks);
    this.drawLines(ctx, plot, frame, theme);
    ctx.restore();
    this.drawBands(ctx, view, plot, frame, theme);
    if (plot.strip) this.drawUse(ctx, plot, frame, theme);
  }

  drawGrid(ctx, view, plot, { x, y }, theme) {
    ctx.fillStyle = theme.plot;
    ctx.fillRect(plot.x, plot.y, plot.width, plot.height);
    const step = niceStep(((view.high - view.low) / 2 ** 30 / plot.height) * 48);
    const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
    ctx.textAlign = "right";
    for (let tick = Math.ceil(view.low / 2 ** 30 / step) * step; tick * 2 ** 30 <= view.high; tick += step) {
      const at = Math.round(y(tick * 2 ** 30)) + 0.5;
      ctx.fillStyle = theme.grid;
      ctx.fillRect(plot.x, at - 0.5, plot.width, 1);
      ctx.fillStyle = theme.ink;
      ctx.fillText((Math.abs(tick) < step / 2 ? 0 : tick).toFixed(digits), plot.x - 7, at);
    }
    ctx.textAlign = "left";
    ctx.fillText("GiB", 6, plot.y - 10);
    ctx.textAlign = "center";
    if (this.byTime) this.drawTimes(ctx, view, plot, theme);
    else this.drawPositions(ctx, view, plot, x, theme);
  }

  drawTimes(ctx, view, plot, theme) {
    const { stepMs } = this.map;
    const perMs = plot.width / (view.right - view.left) / stepMs;
    const step = niceStep(70 / perMs);
    const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
    for (let tick = Math.ceil((view.left * stepMs) / step) * step; tick <= view.right * stepMs * (1 + 1e-9); tick += step)
      mark(ctx, plot, plot.x + (tick - view.left * stepMs) * perMs, tick.toFixed(digits), theme);
    under(ctx, plot, "predicted time, ms; a loop has the time of all its iterations", theme);
  }

  drawPositions(ctx, view, plot, x, theme) {
    const [from, to] = [this.positionAt(view.left), this.positionAt(Math.min(view.right, 1 - 1e-12))];
    const every = Math.max(1, niceStep(((to - from + 1) / plot.width) * 60));
    let free = -Infinity;
    for (let p = Math.ceil(from / every) * every; p <= to; p += every) {
      const at = (x(p) + x(p + 1)) / 2;
      if (at < plot.x || at > plot.x + plot.width || at < free) continue;
      mark(ctx, plot, at, grouped(p), theme);
      free = at + 44;
    }
    under(ctx, plot, "position in the program, in XLA's order", theme);
  }

  // The bytes in use at each position, below the plot.
  drawUse(ctx, plot, { x }, theme) {
    const { map, budget } = this;
    const [top, height] = [plot.strip, STRIP.height - 22];
    const high = this.most() || 1;
    const y = (bytes) => top + height * (1 - bytes / high);
    ctx.fillStyle = theme.plot;
    ctx.fillRect(plot.x, top, plot.width, height);
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.x, top - 1, plot.width, height + 2);
    ctx.clip();
    ctx.fillStyle = theme.use;
    const most = new Float64Array(Math.ceil(plot.width)); // of each column of pixels
    for (let p = 0; p < map.program.length; p++) {
      const [left, right] = [Math.floor(x(p) - plot.x), Math.ceil(x(p + 1) - plot.x)]; // a spike has a pixel at least
      for (let at = Math.max(left, 0); at < Math.min(right, most.length); at++) most[at] = Math.max(most[at], map.inUse[p]);
    }
    most.forEach((bytes, at) => ctx.fillRect(plot.x + at, y(bytes), 1, top + height - y(bytes)));
    const at = Math.round((x(map.peak) + x(map.peak + 1)) / 2) + 0.5;
    if (map.program.length) line(ctx, theme.peak, [2, 5], at, top, at, top + height);
    if (budget) line(ctx, theme.budget, [7, 4], plot.x, y(budget) + 0.75, plot.x + plot.width, y(budget) + 0.75);
    ctx.restore();
    ctx.textAlign = "right";
    ctx.fillStyle = theme.ink;
    ctx.fillText((high / 2 ** 30).toPrecision(3), plot.x - 7, top + 5);
    ctx.fillText("0", plot.x - 7, top + height - 4);
    ctx.textAlign = "left";
    ctx.fillStyle = theme.soft;
    ctx.fillText("in use", 6, top + height / 2);
  }

  drawBlocks(ctx, view, plot, { x, y }, theme, marks) {
    const { map } = this;
    const [right, bottom] = [plot.x + plot.width, plot.y + plot.height];
    const labels = [];
    let style;
    for (let k = 0; k < this.order.length; k++) {
      const b = this.order[k];
      if (this.hiddenBy[b] >= 0) continue;
      const x0 = x(map.first[b]);
      const x1 = x(map.last[b] + 1);
      if (x1 < plot.x || x0 > right) continue;
      let y1 = y(map.low[b]);
      let y0 = y(map.low[b] + map.bytes[b]);
      if (y1 < plot.y || y0 > bottom) continue;
      const height = y1 - y0;
      if (marks.has(b)) y1 = Math.max(y1, y0 + 1.5);
      else if (height < 4) [y0, y1] = [Math.round(y0), Math.round(y1)]; // so that what lies on each other tiles the pixels
      if (y1 === y0) continue;
      const fill = theme.fills[map.category[b]];
      if (fill !== style) ctx.fillStyle = style = fill;
      const alpha = marks.dims(b) ? 0.12 : 1;
      if (ctx.globalAlpha !== alpha) ctx.globalAlpha = alpha;
      const width = Math.max(x1 - x0, 0.7);
      ctx.fillRect(x0, y0, width > 3 ? width - 0.7 : width, height < 4 ? y1 - y0 : height - 0.7);
      if (height > 12 && width > 44 && alpha === 1) labels.push(b);
    }
    ctx.globalAlpha = 1;
    ctx.fillStyle = theme.folded;
    for (const [first, last, low, high] of this.dotted)
      ctx.fillRect(x(first), y(high), x(last + 1) - x(first), y(low) - y(high));
    ctx.textAlign = "left";
    const named = new Set();
    for (const b of labels.slice(0, 400)) {
      const left = Math.max(x(map.first[b]), plot.x) + 5;
      const room = Math.min(x(map.last[b] + 1), right) - left - 5;
      const [top, low] = [Math.max(y(map.low[b] + map.bytes[b]), plot.y), Math.min(y(map.low[b]), bottom)];
      if (room < 30 || low - top < 12) continue;
      const name = b < map.num ? labelled(map, b) : "gap";
      const text = fitting(ctx, name, `  ${gib(map.bytes[b])}`, room);
      if (room > Math.min(ctx.measureText(name).width, 90)) named.add(b);
      if (b >= map.num) {
        ctx.fillStyle = theme.plot; // text on hatching can't be read
        ctx.fillRect(left - 3, (top + low) / 2 - 6, ctx.measureText(text).width + 6, 12);
      }
      ctx.fillStyle = theme.onFills[map.category[b]];
      ctx.fillText(text, left, (top + low) / 2);
    }
    for (const { items, label } of map.holders) {
      const [b] = items;
      if (map.bytes[b] < LARGE * map.total) break; // the largest come first
      const middle = (y(map.low[b]) + y(map.low[b] + map.bytes[b])) / 2;
      if (named.has(b) || this.hiddenBy[b] >= 0 || marks.dims(b)) continue;
      if (middle < plot.y || middle > bottom || x(map.last[b] + 1) < plot.x || x(map.first[b]) > right) continue;
      const size = `  ${gib(map.bytes[b])}`;
      const text = shorten(ctx, label, 0.45 * plot.width - ctx.measureText(size).width) + size;
      const half = ctx.measureText(text).width / 2 + 9;
      const isLeft = x(map.last[b] + 1) + 2 * half > right;
      tag(ctx, theme, theme.ink, text, isLeft ? x(map.first[b]) - half : x(map.last[b] + 1) + half, middle, plot);
    }
    for (const [b, colour] of marks.outlined()) {
      if (b === undefined || this.hiddenBy[b] >= 0) continue;
      const [left, top] = [x(map.first[b]), y(map.low[b] + map.bytes[b])];
      for (const [style, width] of [
        [theme.paper, 5],
        [colour, 2.5],
      ]) {
        Object.assign(ctx, { strokeStyle: style, lineWidth: width });
        ctx.strokeRect(left, top, Math.max(2, x(map.last[b] + 1) - left), Math.max(2, y(map.low[b]) - top));
      }
    }
  }

  drawLines(ctx, plot, { x, y }, theme) {
    const { map, budget } = this;
    if (map.program.length) {
      const at = Math.round((x(map.peak) + x(map.peak + 1)) / 2) + 0.5;
      line(ctx, theme.peak, [2, 5], at, plot.y, at, plot.y + plot.height); // open: a spike is often no wider than the line
      tag(ctx, theme, theme.peak, `peak at ${grouped(map.peak)}`, at, plot.y + plot.height - 10, plot);
    }
    const [total, limit] = [map.total, budget].map((bytes) => Math.round(y(bytes)) + 0.5);
    // A tag is above its line, or below where it would cover the other one.
    const beside = (at, other) => (other < at && at - other < TAG ? at + 9 : at - 9);
    line(ctx, theme.ink, [2, 3], plot.x, total, plot.x + plot.width, total);
    if (budget) line(ctx, theme.budget, [7, 4], plot.x, limit, plot.x + plot.width, limit);
    tag(ctx, theme, theme.ink, `total ${gib(map.total)}`, plot.x + Math.min(60, 0.15 * plot.width), beside(total, limit), plot);
    if (!budget) return;
    const above = limit < plot.y;
    const text = above ? `▲ budget ${gib(budget)}` : `budget ${gib(budget)}`;
    tag(ctx, theme, theme.budget, text, plot.x + plot.width - 80, above ? plot.y + 9 : beside(limit, total), plot);
  }

  // Above the plot: the phases, and a handle for each loop. At its right: what the allocations are.
  drawBands(ctx, view, plot, { x, y }, theme) {
    const { map } = this;
    const right = plot.x + plot.width;
    ctx.textAlign = "center";
    map.phases.forEach(([phase, first, last, took]) => {
      const [from, to] = [Math.max(x(first), plot.x), Math.min(x(last + 1), right)];
      if (to <= from) return;
      ctx.fillStyle = theme.phases[phase];
      ctx.fillRect(from, 2, to - from - 1, 16);
      ctx.fillStyle = theme.ink;
      const text = fitting(ctx, phase, took ? `  ${ms(took)}` : "", to - from - 6);
      if (to - from > 30) ctx.fillText(text, (from + to) / 2, 10.5);
    });
    for (const handle of this.handles(view, plot)) {
      const folded = this.folded[handle.loop];
      ctx.fillStyle = theme.band;
      ctx.fillRect(handle.x, handle.y, handle.width, handle.height);
      ctx.strokeStyle = theme.soft;
      ctx.lineWidth = 1;
      ctx.setLineDash(folded ? [3, 2] : []);
      ctx.strokeRect(handle.x + 0.5, handle.y + 0.5, handle.width - 1, handle.height - 1);
      ctx.setLineDash([]);
      const loop = map.loops[handle.loop];
      const times = `× ${loop.trip_count ?? "?"}`;
      const long = folded ? `+ ${times}, ${grouped(this.hidden.get(handle.loop))} buffers folded` : `− ${loopText(loop)}`;
      const text = [long, folded ? `+ ${times}` : `− ${times}`, times, folded ? "+" : "−"].find(
        (some) => ctx.measureText(some).width < handle.width - 4,
      );
      ctx.fillStyle = theme.ink;
      if (text) ctx.fillText(text, handle.x + handle.width / 2, handle.y + handle.height / 2 + 1);
    }
    for (const { kind, low, high } of map.sections) {
      const [top, bottom] = [Math.max(y(high), plot.y), Math.min(y(low), plot.y + plot.height)];
      if (bottom - top < 4) continue;
      line(ctx, theme.soft, [], right + 5.5, top + 1, right + 5.5, bottom - 1);
      if (bottom - top < 60) continue;
      ctx.save();
      ctx.translate(right + 13, (top + bottom) / 2);
      ctx.rotate(-Math.PI / 2);
      ctx.fillStyle = theme.soft;
      ctx.fillText(fitting(ctx, KIND_TEXT[kind], ` ${gib(high - low)}`, bottom - top), 0, 0);
      ctx.restore();
    }
  }
}

const plotArea = ({ width, height }) => {
  const strip = height >= STRIP.least ? STRIP.height : 0;
  return {
    x: MARGIN.left,
    y: MARGIN.top,
    width: Math.max(10, width - MARGIN.left - MARGIN.right),
    height: Math.max(10, height - MARGIN.top - MARGIN.bottom - strip),
    strip: strip && height - strip + 10,
  };
};

function mark(ctx, plot, at, text, theme) {
  ctx.fillStyle = theme.ink;
  ctx.fillRect(at - 0.5, plot.y + plot.height, 1, 4);
  ctx.fillText(text, at, plot.y + plot.height + 12);
}

function under(ctx, plot, text, theme) {
  ctx.fillStyle = theme.soft;
  ctx.fillText(shorten(ctx, text, plot.width), plot.x + plot.width / 2, plot.y + plot.height + 28);
}

// The next of 1, 2, 5, 10, 20, ... not below `least`.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
}

function line(ctx, colour, dash, x0, y0, x1, y1) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.5;
  ctx.setLineDash(dash);
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
  ctx.setLineDash([]);
}

// A word on a line, inside the plot, on a ground of its own.
function tag(ctx, theme, colour, text, x, y, plot) {
  const width = ctx.measureText(text).width + 10;
  if (y < plot.y - 9 || y > plot.y + plot.height || x + width < plot.x || x - width > plot.x + plot.width) return;
  const left = Math.min(Math.max(x - width / 2, plot.x + 2), plot.x + plot.width - width - 2);
  ctx.fillStyle = theme.paper;
  ctx.fillRect(left, Math.max(y - 8, plot.y), width, 16);
  ctx.fillStyle = colour;
  ctx.textAlign = "left";
  ctx.fillText(text, left + 5, Math.max(y, plot.y + 8) + 0.5);
}

// A name with its size, or the name alone where both are too long.
function fitting(ctx, name, size, room) {
  return ctx.measureText(name + size).width <= room ? name + size : shorten(ctx, name, room);
}

function shorten(ctx, text, room) {
  const shown = text.slice(0, 200);
  const width = ctx.measureText(shown).width;
  if (width <= room && shown.length === text.length) return shown;
  const length = Math.floor((shown.length * room) / width) - 1;
  return length < 3 ? "" : `${shown.slice(0, length)}…`;
}

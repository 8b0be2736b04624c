// A canvas that shows a scene: hover, click, zoom and pan, by mouse and keyboard.

const PAN = 0.1; // of the view, for an arrow key
const ZOOM = 1.25;

class Viewer {
  // `events`: pin(item, viewer), changed(viewer, cause), at(position, viewer). `marks`: what is matched, dimmed, outlined.
  constructor(canvas, tooltip, marks, events) {
    Object.assign(this, { canvas, tooltip, marks, events, scene: null, hover: undefined, scheduled: false });
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    canvas.addEventListener("pointerleave", () => (this.hovered(undefined), this.events.at(undefined, this)));
    this.fingers = new Map();
    canvas.addEventListener("pointerdown", (event) => this.pressed(event));
    for (const end of ["pointerup", "pointercancel"])
      window.addEventListener(end, (event) => {
        this.fingers.delete(event.pointerId);
        setTimeout(() => this.fingers.size || (this.drag = null));
      });
    canvas.addEventListener("click", (event) => this.clicked(event));
    canvas.addEventListener("dblclick", (event) => this.zoom(event.shiftKey ? 1 / 4 : 4, event.offsetX, event.offsetY));
    canvas.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.hovered(undefined));
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }

  show(scene) {
    this.scene = scene;
    this.hover = undefined;
    this.reset();
  }

  size() {
    return { width: this.canvas.clientWidth, height: this.canvas.clientHeight };
  }

  plot() {
    return plotArea(this.size());
  }

  whole() {
    return this.scene.whole(this.canvas.clientHeight && this.plot().height);
  }

  redraw() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
    });
  }

  draw() {
    const size = this.size();
    if (!this.scene || !size.width) return;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(size.width * ratio), Math.round(size.height * ratio)];
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    const context = this.canvas.getContext("2d", { alpha: false });
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.scene.draw(context, this.view, size, themeNow(), this.marks.with(this.hover));
    const { left, right, low, high } = this.view;
    this.canvas.dataset.view = JSON.stringify([left, right, low, high]); // for scripts, and for those who test this page
    this.canvas.dataset.plot = JSON.stringify(Object.values(this.plot()).slice(0, 4));
  }

  setView(view, cause = "view") {
    const whole = this.whole();
    const [most, tallest] = [1, Math.max(whole.high, 1.04 * (this.scene.budget ?? 0))];
    const width = Math.min(most, Math.max(view.right - view.left, 2 / (this.scene.map.program.length + 2) / 4));
    const height = Math.min(tallest, Math.max(view.high - view.low, 64));
    const middle = { x: (view.left + view.right) / 2, y: (view.low + view.high) / 2 };
    const left = Math.min(Math.max(middle.x - width / 2, 0), 1 - width);
    const low = Math.min(Math.max(middle.y - height / 2, 0), tallest - height);
    this.view = { left, right: left + width, low, high: low + height };
    this.redraw();
    this.events.changed(this, cause);
  }

  reset() {
    this.setView(this.whole());
  }

  showSection({ low, high }) {
    this.setView({ ...this.view, low, high: high + 0.04 * (high - low) });
  }

  // The point (px, py) stays where it is; without one, the middle.
  zoom(factor, px, py) {
    const { view } = this;
    const plot = this.plot();
    const at = {
      x: px === undefined ? 0.5 : (px - plot.x) / plot.width,
      y: py === undefined ? 0.5 : 1 - (py - plot.y) / plot.height,
    };
    const [x, y] = [view.left + at.x * (view.right - view.left), view.low + at.y * (view.high - view.low)];
    const [width, height] = [(view.right - view.left) / factor, (view.high - view.low) / factor];
    this.setView({
      left: x - at.x * width,
      right: x + (1 - at.x) * width,
      low: y - at.y * height,
      high: y + (1 - at.y) * height,
    });
  }

  pan(shareX, shareY, from = this.view) {
    const [x, y] = [shareX * (from.right - from.left), shareY * (from.high - from.low)];
    this.setView({ left: from.left + x, right: from.right + x, low: from.low + y, high: from.high + y });
  }

  // Brings an item into view, with its surroundings if it is small.
  reveal(item) {
    const { scene } = this;
    const { map } = scene;
    if (scene.hiddenBy[item] >= 0) {
      scene.reveal(item);
      this.events.changed(this, "fold");
    }
    const [left, right] = [scene.edges[map.first[item]], scene.edges[map.last[item] + 1]];
    const [low, high] = [map.low[item], map.low[item] + map.bytes[item]];
    const plot = this.plot();
    const small = ((right - left) / (this.view.right - this.view.left)) * plot.width < 4;
    const flat = ((high - low) / (this.view.high - this.view.low)) * plot.height < 3;
    const inside = left < this.view.right && right > this.view.left && low < this.view.high && high > this.view.low;
    if (inside && !small && !flat) return this.redraw();
    const width = small ? 60 * (right - left) : this.view.right - this.view.left;
    const height = flat ? 30 * (high - low) : this.view.high - this.view.low;
    const middle = { x: (left + right) / 2, y: (low + high) / 2 };
    this.setView({
      left: middle.x - width / 2,
      right: middle.x + width / 2,
      low: middle.y - height / 2,
      high: middle.y + height / 2,
    });
  }

  toggle(loop) {
    this.scene.toggle(loop);
    this.setView(this.view, "fold");
  }

  hovered(item, px = 0, py = 0) {
    if (item !== this.hover) this.redraw();
    this.hover = item;
    this.tooltip.hidden = item === undefined || item === this.marks.pinned; // the pinned one has its panel
    if (this.tooltip.hidden) return;
    const { map } = this.scene;
    fillFacts(this.tooltip, facts(map, item), 160);
    const box = this.canvas.getBoundingClientRect();
    const [width, height] = [this.tooltip.offsetWidth, this.tooltip.offsetHeight];
    const [left, top] = [box.left + px + 14, box.top + py + 14];
    this.tooltip.style.left = `${left + width < window.innerWidth ? left : Math.max(4, left - width - 28)}px`;
    this.tooltip.style.top = `${Math.max(4, Math.min(top, window.innerHeight - height - 8))}px`;
  }

  pressed(event) {
    this.fingers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.drag = { x: event.offsetX, y: event.offsetY, view: this.view, far: this.fingers.size > 1, apart: this.apart() };
  }

  // The pixels between two fingers; 0 with fewer or more.
  apart() {
    const [one, other] = this.fingers.size === 2 ? [...this.fingers.values()] : [];
    return one ? Math.hypot(one.x - other.x, one.y - other.y) : 0;
  }

  pinched(event) {
    this.fingers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    const [one, other] = [...this.fingers.values()];
    const apart = this.apart();
    if (!this.drag?.apart || !apart) return;
    this.zoom(apart / this.drag.apart, (one.x + other.x) / 2, (one.y + other.y) / 2);
    this.drag.apart = apart;
  }

  moved(event) {
    if (!this.scene) return;
    if (this.fingers.size > 1) return this.pinched(event);
    const { drag } = this;
    if (drag && event.buttons) {
      const plot = this.plot();
      const [dx, dy] = [event.offsetX - drag.x, event.offsetY - drag.y];
      drag.far ||= Math.hypot(dx, dy) > 3;
      this.hovered(undefined);
      if (drag.far) this.pan(-dx / plot.width, dy / plot.height, drag.view);
      return;
    }
    const found = this.scene.at(this.view, this.plot(), event.offsetX, event.offsetY);
    this.canvas.style.cursor = [found.loop, found.item, found.section].some((one) => one !== undefined) ? "pointer" : "grab";
    if (event.pointerType !== "touch") this.hovered(found.item, event.offsetX, event.offsetY);
    this.events.at(found.position, this);
  }

  clicked(event) {
    if (this.drag?.far) return;
    const found = this.scene.at(this.view, this.plot(), event.offsetX, event.offsetY);
    if (found.loop !== undefined) this.toggle(found.loop);
    else if (found.section) this.showSection(found.section);
    else this.events.pin(found.item, this);
    this.tooltip.hidden = true;
  }

  wheeled(event) {
    event.preventDefault();
    const scale = event.deltaMode === 1 ? 30 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.pan(((event.deltaX || event.deltaY) * scale) / this.plot().width, 0);
    } else {
      this.zoom(Math.exp((-event.deltaY * scale) / 500), event.offsetX, event.offsetY);
    }
    this.hovered(undefined);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => this.pan(-PAN, 0),
      ArrowRight: () => this.pan(PAN, 0),
      ArrowUp: () => this.pan(0, PAN),
      ArrowDown: () => this.pan(0, -PAN),
      "+": () => this.zoom(ZOOM),
      "=": () => this.zoom(ZOOM),
      "-": () => this.zoom(1 / ZOOM),
      0: () => this.reset(),
      t: () => this.scene.map.sections.filter(({ kind }) => kind === "temp").forEach((section) => this.showSection(section)),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }
}

// Items of the scene that stand out: those that a search or a category chose, the pinned one, the hovered one.
class Marks {
  constructor() {
    this.matches = null; // a Set, or null where nothing is searched
    this.category = null; // an index, or null
    this.categoryOf = () => null;
    this.pinned = undefined;
  }

  with(hover) {
    const theme = themeNow();
    return {
      has: (item) => item === this.pinned || item === hover || (this.matches?.has(item) ?? false),
      dims: (item) =>
        item !== hover &&
        item !== this.pinned &&
        ((this.matches !== null && !this.matches.has(item)) ||
          (this.category !== null && this.categoryOf(item) !== this.category)),
      outlined: () => [
        [hover, theme.ink],
        [this.pinned, theme.accent],
      ],
    };
  }
}

// Colours live in the style sheet; the canvas reads them once per theme.
let themeRead = null;
const themeChanged = () => (themeRead = null);

function themeNow() {
  if (themeRead) return themeRead;
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name.replaceAll(" ", "-")}`).trim();
  const names = [...DATA.categories, "gaps"];
  const plain = names.map((name) => colour(name) || colour("other"));
  const fills = plain.map((fill, i) => (names[i] === "gaps" ? pattern(colour("plot"), fill, hatch) : fill));
  themeRead = {
    font: `11.5px ${style.fontFamily}`,
    ...Object.fromEntries(
      ["paper", "plot", "grid", "ink", "soft", "peak", "budget", "band", "accent", "use"].map((name) => [name, colour(name)]),
    ),
    phases: Object.fromEntries(["forward", "backward", "update"].map((name) => [name, colour(`phase-${name}`)])),
    fills,
    fillOf: (category) => fills[names.indexOf(category)],
    onFills: plain.map((fill, i) => (names[i] === "gaps" ? colour("ink") : brightness(fill) > 0.55 ? "#000" : "#fff")),
    folded: pattern(colour("plot"), colour("folded"), dots),
  };
  return themeRead;
}

const brightness = (colour) => {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
  return 0.3 * r + 0.59 * g + 0.11 * b;
};

// Holes are hatched, what a fold hides is dotted.
function pattern(ground, ink, draw) {
  const tile = Object.assign(document.createElement("canvas"), { width: 6, height: 6 });
  const context = tile.getContext("2d");
  context.fillStyle = ground;
  context.fillRect(0, 0, 6, 6);
  Object.assign(context, { fillStyle: ink, strokeStyle: ink, lineWidth: 1.5 });
  draw(context);
  return context.createPattern(tile, "repeat");
}

function hatch(context) {
  context.beginPath();
  for (const at of [-6, 0, 6]) {
    context.moveTo(at - 1, 7);
    context.lineTo(at + 7, -1);
  }
  context.stroke();
}

function dots(context) {
  context.fillRect(0, 0, 2, 2);
  context.fillRect(3, 3, 2, 2);
}

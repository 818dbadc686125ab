// Draws the panels of a report: hover to read values, drag or wheel to zoom, double click to see all, click a name to
// hide its curve. The data is in the page (#panels); nothing is fetched.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const SIZE = { width: 620, height: 340, left: 62, right: 14, top: 12, bottom: 46 };
const COLOURS = JSON.parse(document.getElementById("colours").textContent);
const colourOf = (series) => COLOURS[series.hue % COLOURS.length];
const DASHES = ["none", "8 3 2 3", "2 3"]; // of the first curves, and of those whose colour is another's
const dashesOf = (series) => (series.control ? "6 4" : DASHES[Math.floor(series.hue / COLOURS.length) % DASHES.length]);

function element(parent, name, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  parent.appendChild(node);
  return node;
}

const number = (value) => {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
};

// An axis maps values to pixels: linear or logarithmic, over a window [low, high] that zooming changes.
function axis(low, high, from, to, log) {
  const bend = log ? (v) => Math.log10(Math.max(v, 1e-12)) : (v) => v;
  const unbend = log ? (v) => 10 ** v : (v) => v;
  const a = bend(low), b = bend(high);
  return {
    low, high,
    place: (v) => from + ((bend(v) - a) / (b - a)) * (to - from),
    value: (p) => unbend(a + ((p - from) / (to - from)) * (b - a)),
    ticks: () => (log && b - a >= 1 ? decades(a, b) : steps(low, high)),
  };
}

function decades(a, b) {
  const found = [];
  const factors = b - a < 3 ? [1, 2, 5] : [1];
  for (let k = Math.floor(a); k <= Math.ceil(b); k++)
    for (const factor of factors) {
      const value = factor * 10 ** k;
      if (Math.log10(value) >= a && Math.log10(value) <= b) found.push(value);
    }
  return found;
}

function steps(low, high) {
  const rough = (high - low) / 6;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * unit).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(k * step);
  return found;
}

function extent(values, log) {
  const known = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
  let low = Math.min(...known), high = Math.max(...known);
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  const margin = log ? 0 : 0.04 * (high - low);
  return log ? [low / 1.1, high * 1.1] : [low - margin, high + margin];
}

class Plot {
  constructor(figure, panel) {
    this.figure = figure;
    this.panel = panel;
    this.hidden = new Set();
    this.svg = element(figure, "svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img" });
    this.svg.setAttribute("aria-label", `${panel.title}: ${panel.y_label}`);
    this.tip = figure.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true }));
    this.legend();
    this.reset();
    this.listen();
  }

  visible() {
    return this.panel.series.filter((_, k) => !this.hidden.has(k));
  }

  reset() {
    const shown = this.visible().length ? this.visible() : this.panel.series;
    const points = !!this.panel.ticks.length;
    this.x = points ? [-0.5, this.panel.ticks.length - 0.5] : extent(shown.flatMap((s) => s.x), this.panel.log_x);
    this.y = extent(shown.flatMap((s) => [...s.low, ...s.high]), this.panel.log_y);
    this.draw();
  }

  draw() {
    const { width, height, left, right, top, bottom } = SIZE;
    this.svg.replaceChildren();
    this.scaleX = axis(...this.x, left, width - right, this.panel.log_x);
    this.scaleY = axis(...this.y, height - bottom, top, this.panel.log_y);
    const clip = `clip-${this.figure.dataset.panel}`;
    const area = { x: left, y: top, width: width - left - right, height: height - top - bottom };
    element(element(this.svg, "clipPath", { id: clip }), "rect", area);
    this.grid();
    this.curves = element(this.svg, "g", { "clip-path": `url(#${clip})` });
    this.panel.series.forEach((series, k) => !this.hidden.has(k) && this.curve(series, colourOf(series)));
    this.over = element(this.svg, "g", { class: "over" });
  }

  grid() {
    const { width, height, left, right, top, bottom } = SIZE;
    const names = this.panel.ticks;
    for (const value of names.length ? names.keys() : this.scaleX.ticks()) {
      const x = this.scaleX.place(value);
      element(this.svg, "line", { class: "grid", x1: x, x2: x, y1: top, y2: height - bottom });
      const label = names.length ? names[value] : number(value);
      element(this.svg, "text", { x, y: height - bottom + 16, "text-anchor": "middle" }, label);
    }
    for (const value of this.scaleY.ticks()) {
      const y = this.scaleY.place(value);
      element(this.svg, "line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y });
      element(this.svg, "text", { x: left - 6, y: y + 4, "text-anchor": "end" }, number(value));
    }
    element(this.svg, "text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, this.panel.x_label);
    const turned = { transform: `translate(14 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" };
    element(this.svg, "text", turned, this.panel.y_label);
  }

  curve(series, colour) {
    const at = (values) => series.x.map((x, k) => `${this.scaleX.place(x).toFixed(2)},${this.scaleY.place(values[k]).toFixed(2)}`);
    if (this.panel.ticks.length) {
      series.x.forEach((x, k) => {
        const [px, low, high] = [this.scaleX.place(x), this.scaleY.place(series.low[k]), this.scaleY.place(series.high[k])];
        element(this.curves, "line", { x1: px, x2: px, y1: low, y2: high, stroke: colour, "stroke-width": 2 });
      });
    } else {
      const band = [...at(series.low), ...at(series.high).reverse()].join(" ");
      element(this.curves, "polygon", { points: band, fill: colour, opacity: 0.15 });
      const line = { class: "curve", points: at(series.y).join(" "), fill: "none", stroke: colour, "stroke-width": 1.8 };
      element(this.curves, "polyline", { ...line, "stroke-dasharray": dashesOf(series) });
    }
    if (series.x.length <= 12 || this.panel.ticks.length)
      series.x.forEach((x, k) =>
        element(this.curves, "circle", { cx: this.scaleX.place(x), cy: this.scaleY.place(series.y[k]), r: 3.5, fill: colour }));
  }

  legend() {
    const list = this.figure.appendChild(document.createElement("div"));
    list.className = "legend";
    this.panel.series.forEach((series, k) => {
      const button = list.appendChild(document.createElement("button"));
      button.style.setProperty("--colour", colourOf(series));
      button.className = series.control ? "control" : "";
      button.textContent = series.label;
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        this.hidden.has(k) ? this.hidden.delete(k) : this.hidden.add(k);
        button.setAttribute("aria-pressed", String(!this.hidden.has(k)));
        this.draw();
      });
    });
    const log = list.appendChild(document.createElement("button"));
    log.className = "log";
    log.textContent = "log y";
    log.setAttribute("aria-pressed", String(this.panel.log_y));
    log.addEventListener("click", () => {
      this.panel.log_y = !this.panel.log_y;
      log.setAttribute("aria-pressed", String(this.panel.log_y));
      this.reset();
    });
  }

  position(event) {
    const box = this.svg.getBoundingClientRect();
    return [((event.clientX - box.left) * SIZE.width) / box.width, ((event.clientY - box.top) * SIZE.height) / box.height];
  }

  listen() {
    let start = null;
    this.svg.addEventListener("pointerdown", (event) => {
      start = this.position(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", (event) => (start ? this.select(start, this.position(event)) : this.hover(event)));
    this.svg.addEventListener("pointerup", (event) => {
      const end = this.position(event);
      if (start && Math.hypot(end[0] - start[0], end[1] - start[1]) > 8) this.zoomTo(start, end);
      start = null;
    });
    this.svg.addEventListener("pointerleave", () => {
      this.tip.hidden = true;
      this.over.replaceChildren();
    });
    this.svg.addEventListener("dblclick", () => this.reset());
    this.svg.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  select([x0, y0], [x1, y1]) {
    this.tip.hidden = true;
    this.over.replaceChildren();
    const box = { x: Math.min(x0, x1), y: Math.min(y0, y1), width: Math.abs(x1 - x0), height: Math.abs(y1 - y0) };
    element(this.over, "rect", { class: "selection", ...box });
  }

  zoomTo([x0, y0], [x1, y1]) {
    const ordered = (a, b) => (a < b ? [a, b] : [b, a]);
    this.x = ordered(this.scaleX.value(x0), this.scaleX.value(x1));
    this.y = ordered(this.scaleY.value(y0), this.scaleY.value(y1));
    this.draw();
  }

  wheel(event) {
    event.preventDefault();
    const factor = event.deltaY > 0 ? 1.25 : 0.8;
    const [px, py] = this.position(event);
    const window = (scale, p, from, to) => [scale.value(p + (from - p) * factor), scale.value(p + (to - p) * factor)];
    this.x = window(this.scaleX, px, SIZE.left, SIZE.width - SIZE.right);
    this.y = window(this.scaleY, py, SIZE.height - SIZE.bottom, SIZE.top);
    this.draw();
  }

  hover(event) {
    const [px, py] = this.position(event);
    this.over.replaceChildren();
    const rows = [];
    let shownX = null;
    this.panel.series.forEach((series, k) => {
      if (this.hidden.has(k)) return;
      const distance = (j) => Math.abs(this.scaleX.place(series.x[j]) - px);
      const near = [...series.x.keys()].reduce((a, b) => (distance(b) < distance(a) ? b : a));
      if (distance(near) > 40) return;
      const [x, y] = [this.scaleX.place(series.x[near]), this.scaleY.place(series.y[near])];
      element(this.over, "circle", { cx: x, cy: y, r: 4, fill: colourOf(series) });
      shownX = shownX ?? series.x[near];
      const range = series.low[near] === series.high[near] ? "" : ` (${number(series.low[near])} – ${number(series.high[near])})`;
      rows.push([series.label, number(series.y[near]) + range, colourOf(series)]);
    });
    this.tip.hidden = !rows.length;
    if (!rows.length) return;
    const name = this.panel.ticks.length ? this.panel.ticks[Math.round(shownX)] : `${this.panel.x_label} ${number(shownX)}`;
    const line = (text, colour) => Object.assign(document.createElement("div"), { textContent: text, style: colour ? `color: ${colour}` : "" });
    this.tip.replaceChildren(line(name), ...rows.map(([label, value, colour]) => line(`${label}: ${value}`, colour)));
    const box = this.svg.getBoundingClientRect();
    const right = px > SIZE.width / 2;
    this.tip.style.left = right ? "" : `${((px + 14) * box.width) / SIZE.width}px`;
    this.tip.style.right = right ? `${((SIZE.width - px + 14) * box.width) / SIZE.width}px` : "";
    this.tip.style.top = `${(Math.max(0, py - 20) * box.height) / SIZE.height}px`;
  }
}

const panels = JSON.parse(document.getElementById("panels").textContent);
for (const figure of document.querySelectorAll("figure[data-panel]")) {
  const caption = figure.querySelector("figcaption");
  new Plot(figure, panels[Number(figure.dataset.panel)]);
  figure.appendChild(caption);
}
document.documentElement.dataset.drawn = String(panels.length);

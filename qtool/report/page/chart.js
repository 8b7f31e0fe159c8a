// What the drawings share: axes and grid, names that find a free place, and marks as links: a mouse points at
// them, the keyboard moves through them with the arrow keys.
"use strict";

const FAR_RATIO = 8; // values that span more are drawn on a logarithmic axis
const BEYOND = 1.2; // a bar may widen the axis by this many times what the marks span; the rest of it is cut
const REACHES = [13, 22, 34, 48]; // how far from its mark a name may stand, in pixels
const BESIDE = [[1, 0], [-1, 0], [0.8, -0.7], [0.8, 0.7], [-0.8, -0.7], [-0.8, 0.7], [0, -1.1], [0, 1.1]];
const OVER = [...BESIDE.slice(-2), ...BESIDE.slice(0, -2)]; // of a mark on a line: not on the line first
const MARGINS = { marginLeft: 58, marginRight: 18, marginTop: 34, marginBottom: 46 };

function axis(name, values, bounds = []) {
  const isFar = Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > FAR_RATIO;
  const [to, back] = isFar ? [Math.log, Math.exp] : [(v) => v, (v) => v];
  let low = to(Math.min(...values)), high = to(Math.max(...values));
  const span = high - low || Math.abs(high) * 0.1 || 1;
  const beyond = bounds.filter((v) => !isFar || v > 0).map(to);
  low = Math.max(Math.min(low, ...beyond), low - BEYOND * span) - 0.07 * span;
  high = Math.min(Math.max(high, ...beyond), high + BEYOND * span) + 0.07 * span;
  const better = data.metrics[name].better;
  return { type: isFar ? "log" : "linear", domain: [back(low), back(high)], label: `${axisTitle(name)} (${better} is better)`, better };
}

// Round numbers of a logarithmic axis, few enough to stand side by side.
function ticks({ type, domain: [low, high] }, most) {
  if (type !== "log") return most;
  for (const steps of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      found.push(...steps.map((step) => step * 10 ** power).filter((v) => v >= low && v <= high));
    }
    if (found.length <= most) return found;
  }
  return most;
}

// A drawing with axes and grid under its `layers`; its `marks` (x, y) learn where they stand in it (px, py).
function plotted(width, xAxis, yAxis, layers, marks, title) {
  const height = Math.round(Math.min(470, Math.max(320, width * 0.42)));
  const told = (value) => Number(value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  // a logarithmic axis drops words of a format by a count of its own; those of a channel stay
  const worded = (found) => (Array.isArray(found) ? { ticks: found, text: told } : { ticks: found, tickFormat: told });
  const xTicks = worded(ticks(xAxis, width < 560 ? 5 : 10)), yTicks = worded(ticks(yAxis, 7));
  const grid = { stroke: "var(--line)", strokeOpacity: 0.7 };
  const plot = Plot.plot({
    width, height, ...MARGINS,
    style: { background: "none", fontSize: "12px", fontFamily: "inherit" },
    x: { type: xAxis.type, domain: xAxis.domain },
    y: { type: yAxis.type, domain: yAxis.domain },
    marks: [
      Plot.gridX({ ...grid, ticks: xTicks.ticks }),
      Plot.gridY({ ...grid, ticks: yTicks.ticks }),
      Plot.axisX({ ...xTicks, label: xAxis.label, labelAnchor: "right", labelArrow: "none", tickSize: 0, labelOffset: 40 }),
      Plot.axisY({ ...yTicks, label: yAxis.label, labelArrow: "none", tickSize: 0, labelOffset: 50 }),
      ...layers,
    ],
  });
  for (const part of plot.children) part.setAttribute("aria-hidden", "true");
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", title);
  for (const mark of marks) {
    mark.px = plot.scale("x").apply(mark.x);
    mark.py = plot.scale("y").apply(mark.y);
  }
  plot.append(...words(marks, { left: MARGINS.marginLeft, right: width - 2, top: MARGINS.marginTop - 8, bottom: height - MARGINS.marginBottom }));
  return plot;
}

// Draws now, and again when the holder has another width; a drawing of another height is no reason to lose the focus.
function drawnIn(holder, show) {
  let drawn = holder.clientWidth;
  const again = settled(show);
  new ResizeObserver(() => {
    if (holder.clientWidth === drawn) return;
    drawn = holder.clientWidth;
    again();
  }).observe(holder);
  show();
}

// The marks' words: by `rank` each takes the first free place in `reach`; what has none is left to the pointer.
function words(marks, frame) {
  const taken = marks.map((m) => [m.px - 8, m.py - 8, m.px + 8, m.py + 8]);
  const made = [];
  for (const mark of marks.filter((m) => m.words).sort((a, b) => a.rank - b.rank)) {
    const told = mark.words.length > 30 ? `${mark.words.slice(0, 29)}…` : mark.words;
    const length = told.length * (mark.bold ? 7.6 : 6.6);
    const place = free(mark, length, taken, frame, mark.reach ?? REACHES) ?? (mark.must ? above(mark, length, frame) : null);
    if (!place) continue;
    taken.push(place.box);
    if (place.far) made.push(draw("line", { class: "leader", x1: mark.px, y1: mark.py, x2: place.x, y2: place.y, "aria-hidden": "true" }));
    const style = { class: `name${mark.bold ? " taken" : ""}${mark.quiet ? " quiet" : ""}`, x: place.x, y: place.y, dy: "0.35em", "text-anchor": place.anchor, "aria-hidden": "true" };
    made.push(draw("text", style, told));
  }
  return made;
}

function free(mark, length, taken, frame, reach) {
  for (const distance of reach) {
    for (const [dx, dy] of mark.sides ?? BESIDE) {
      const x = mark.px + distance * dx, y = mark.py + distance * dy;
      const left = dx > 0 ? x : dx < 0 ? x - length : x - length / 2;
      const box = [left, y - 8, left + length, y + 8];
      const isInside = box[0] >= frame.left && box[2] <= frame.right && box[1] >= frame.top && box[3] <= frame.bottom;
      const isFree = taken.every((other) => box[2] < other[0] || box[0] > other[2] || box[3] < other[1] || box[1] > other[3]);
      if (isInside && isFree) return { x, y, box, far: distance > 22, anchor: dx > 0 ? "start" : dx < 0 ? "end" : "middle" };
    }
  }
  return null;
}

// Where nothing is free, a name that must stand stands over whatever is there.
function above(mark, length, frame) {
  const x = Math.max(frame.left + length / 2, Math.min(mark.px, frame.right - length / 2));
  const y = mark.py - 20;
  return { x, y, box: [x - length / 2, y - 8, x + length / 2, y + 8], far: false, anchor: "middle" };
}

// Title, value and interval of the metrics that a mark has.
function facts(mark, names) {
  const kept = [...new Set(names)].filter((name) => mark.cells[name]);
  return kept.map((name) => [data.metrics[name].title, withUnit(name, mark.cells[name]), interval(name, mark.cells[name])]);
}

// The marks as links in the order of the arrow keys, with one tip: `metrics` and `remarks(mark)` are what it tells
// under the mark's title; `opened(mark)` hears of the mark that is told of, null when none is.
function targets(marks, { holder, tip, radius, metrics, remarks, opened = () => {} }) {
  let armed = null; // the mark that a finger touched: the second touch follows its link
  const entry = Math.max(0, marks.findIndex((mark) => mark.taken));
  const links = marks.map((mark, number) => {
    const told = facts(mark, metrics).map((fact) => fact.filter(Boolean).join(" ")).join("; ");
    const link = draw("a", {
      href: `#recipe-${mark.recipe}`, tabindex: number === entry ? "0" : "-1",
      "aria-label": [`${mark.name}, ${mark.where}: ${told}`, remarks(mark)].filter(Boolean).join("; "),
    });
    link.append(draw("circle", { cx: mark.px, cy: mark.py, r: radius }));
    const open = () => {
      tell(mark, link);
      opened(mark);
    };
    const close = () => {
      link.classList.remove("on");
      tip.hidden = true;
      opened(null);
    };
    link.addEventListener("pointerenter", open);
    link.addEventListener("focus", open);
    link.addEventListener("pointerleave", close);
    link.addEventListener("blur", close);
    link.addEventListener("keydown", (event) => (event.key === "Escape" ? close() : move(event, number)));
    link.addEventListener("click", (event) => {
      if (event.pointerType !== "touch" || armed === link) return;
      armed = link;
      event.preventDefault();
      event.stopPropagation();
    });
    return link;
  });
  return links;

  function move(event, number) {
    const last = links.length - 1;
    const to = {
      ArrowRight: Math.min(last, number + 1), ArrowDown: Math.min(last, number + 1),
      ArrowLeft: Math.max(0, number - 1), ArrowUp: Math.max(0, number - 1), Home: 0, End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    links[number].setAttribute("tabindex", "-1");
    links[to].setAttribute("tabindex", "0");
    links[to].focus();
  }

  function tell(mark, link) {
    for (const other of link.ownerSVGElement.querySelectorAll("a.on")) other.classList.remove("on");
    link.classList.add("on");
    const lines = facts(mark, metrics).map((fact) => make("tr", {}, ...fact.map((said) => make("td", {}, said))));
    tip.replaceChildren(make("b", {}, mark.title ?? mark.name), make("table", {}, make("tbody", {}, ...lines)), make("p", {}, remarks(mark)));
    tip.hidden = false;
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    const room = holder.clientWidth;
    const left = mark.px + 16 + width <= room ? mark.px + 16 : mark.px - 16 - width;
    tip.style.left = `${Math.max(0, Math.min(left, room - width))}px`;
    tip.style.top = `${Math.max(-20, left < 0 ? mark.py + 18 : mark.py - height / 2)}px`;
  }
}

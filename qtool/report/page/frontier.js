// The interactive frontier: two metrics of one device and batch size, a mark a recipe, drawn by Observable Plot.
// Marks are links: a mouse points at them, the keyboard moves through them with the arrow keys.
"use strict";

{
  const holder = document.getElementById("chart");
  const [across, up, on] = ["axis-x", "axis-y", "chart-group"].map((id) => document.getElementById(id));
  const FAR_RATIO = 8; // values that span more are drawn on a logarithmic axis
  const BEYOND = 1.2; // a bar may widen the axis by this many times what the marks span; the rest of it is cut
  const REACHES = [13, 22, 34, 48]; // how far from its mark a name may stand, in pixels
  const MANY = 14; // of more marks than this only the telling ones have a name that stands afar
  const PEAKS = { cpu: "peak_rss_bytes", cuda: "peak_vram_bytes" };
  let armed = null; // the mark that a finger touched: the second touch follows its link

  const names = Object.keys(data.metrics);
  const groups = data.groups.map((group, number) => [String(number), group.title]);
  const first = Math.max(0, data.groups.findIndex((group) => group.recommended));
  const peak = PEAKS[data.groups[first]?.device];
  const start = [
    ["latency_p50_s", names[0]],
    [data.metric && "score_delta", data.metric, peak, names[1]],
  ].map((wanted) => wanted.find((name) => names.includes(name)));
  const options = names.map((name) => [name, data.metrics[name].title]);
  fill(across, options, start[0]);
  fill(up, options, start[1]);
  fill(on, groups, String(first));
  if (groups.length < 2) on.parentElement.hidden = true;
  if (names.length) {
    across.addEventListener("change", show);
    up.addEventListener("change", show);
    on.addEventListener("change", () => {
      swapPeaks(data.groups[on.value].device);
      show();
    });
    let drawn = holder.clientWidth;
    const again = settled(show);
    new ResizeObserver(() => {
      if (holder.clientWidth === drawn) return; // a drawing of another height is no reason to lose the focus
      drawn = holder.clientWidth;
      again();
    }).observe(holder);
    show();
  } else {
    holder.append(make("p", { class: "nothing" }, "Nothing was measured."));
  }

  // The memory that matters is another metric on another device.
  function swapPeaks(device) {
    for (const select of [across, up]) {
      if (Object.values(PEAKS).includes(select.value) && names.includes(PEAKS[device])) select.value = PEAKS[device];
    }
  }

  function points(group, x, y) {
    const found = [];
    for (const [recipe, of, front, listed] of data.rows) {
      const cells = named(listed);
      if (of !== group || !cells[x] || !cells[y]) continue;
      const name = data.recipes[recipe];
      found.push({
        recipe, name, cells, front: Boolean(front),
        taken: name === data.groups[group].recommended, base: name === data.baseline,
        x: scaled(x, cells[x][0]), y: scaled(y, cells[y][0]),
        xs: cells[x].slice(1).map((value) => scaled(x, value)), ys: cells[y].slice(1).map((value) => scaled(y, value)),
      });
    }
    return found;
  }

  function axis(name, values, bounds) {
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

  // The members that no other member beats in both, the best across first, from edge to edge.
  function stairs(marks, x, y) {
    const sign = (axis) => (axis.better === "higher" ? -1 : 1);
    const worst = (axis) => axis.domain[axis.better === "higher" ? 0 : 1];
    const members = marks.filter((mark) => mark.front);
    members.sort((a, b) => sign(x) * (a.x - b.x) || sign(y) * (a.y - b.y));
    const steps = [];
    for (const mark of members) {
      if (!steps.length || sign(y) * mark.y < sign(y) * steps.at(-1)[1]) steps.push([mark.x, mark.y]);
    }
    return steps.length ? [[steps[0][0], worst(y)], ...steps, [worst(x), steps.at(-1)[1]]] : [];
  }

  function show() {
    const [x, y, group] = [across.value, up.value, Number(on.value)];
    const width = Math.max(300, holder.clientWidth);
    const marks = points(group, x, y);
    armed = null;
    if (!marks.length) {
      const words = `Nothing to draw on ${data.groups[group].title}: no recipe has both ${data.metrics[x].title} and ${data.metrics[y].title} there.`;
      holder.replaceChildren(make("p", { class: "nothing" }, words));
      return;
    }
    const height = Math.round(Math.min(470, Math.max(320, width * 0.42)));
    const xAxis = axis(x, marks.map((m) => m.x), marks.flatMap((m) => m.xs));
    const yAxis = axis(y, marks.map((m) => m.y), marks.flatMap((m) => m.ys));
    const margins = { marginLeft: 58, marginRight: 18, marginTop: 34, marginBottom: 46 };
    const told = (value) => Number(value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 6 });
    const xTicks = { ticks: ticks(xAxis, width < 560 ? 5 : 10), tickFormat: told };
    const yTicks = { ticks: ticks(yAxis, 7), tickFormat: told };
    const grid = { stroke: "var(--line)", strokeOpacity: 0.7 };
    const bar = { stroke: "var(--strong)", strokeWidth: 1.25, clip: true };
    const even = { stroke: "var(--muted)", strokeWidth: 1, clip: true };
    const plot = Plot.plot({
      width, height, ...margins,
      style: { background: "none", fontSize: "12px", fontFamily: "inherit" },
      x: { type: xAxis.type, domain: xAxis.domain },
      y: { type: yAxis.type, domain: yAxis.domain },
      marks: [
        Plot.gridX({ ...grid, ticks: xTicks.ticks }),
        Plot.gridY({ ...grid, ticks: yTicks.ticks }),
        Plot.axisX({ ...xTicks, label: xAxis.label, labelAnchor: "right", labelArrow: "none", tickSize: 0, labelOffset: 40 }),
        Plot.axisY({ ...yTicks, label: yAxis.label, labelArrow: "none", tickSize: 0, labelOffset: 50 }),
        x === "score_delta" ? Plot.ruleX([0], even) : null,
        y === "score_delta" ? Plot.ruleY([0], even) : null,
        Plot.line(stairs(marks, xAxis, yAxis), { curve: "step-after", stroke: "var(--accent)", strokeWidth: 1.5, strokeDasharray: "6 4", clip: true }),
        Plot.ruleY(marks.filter((m) => m.xs.length), { ...bar, y: "y", x1: (m) => m.xs[0], x2: (m) => m.xs[1] }),
        Plot.ruleX(marks.filter((m) => m.ys.length), { ...bar, x: "x", y1: (m) => m.ys[0], y2: (m) => m.ys[1] }),
        ...[false, true].map((front) => dots(marks.filter((m) => m.front === front && !m.taken), front)).flat(),
        Plot.dot(marks.filter((m) => m.taken), { x: "x", y: "y", symbol: "star", r: 9, fill: "var(--star)", stroke: "var(--paper)", strokeWidth: 1 }),
      ],
    });
    for (const part of plot.children) part.setAttribute("aria-hidden", "true");
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `${data.metrics[y].title} against ${data.metrics[x].title}, ${data.groups[group].title}: ${marks.length} recipes`);
    const at = (scale, value) => plot.scale(scale).apply(value);
    for (const mark of marks) [mark.px, mark.py] = [at("x", mark.x), at("y", mark.y)];
    const frame = { left: margins.marginLeft, right: width - 2, top: margins.marginTop - 8, bottom: height - margins.marginBottom };
    plot.append(...labels(marks, frame));
    const tip = make("div", { class: "tip", hidden: "" });
    plot.append(...targets(marks, x, y, tip, group));
    holder.replaceChildren(plot, tip);
  }

  function dots(marks, front) {
    const style = { x: "x", y: "y", fill: front ? "var(--accent)" : "var(--paper)", stroke: front ? "var(--accent)" : "var(--ink)", strokeWidth: 1.5 };
    return [
      Plot.dot(marks.filter((m) => !m.base), { ...style, symbol: "circle", r: 5 }),
      Plot.dot(marks.filter((m) => m.base), { ...style, symbol: "square", r: 6 }),
    ];
  }

  // Names beside the marks: each takes the first free place, and one without a place is left to the pointer.
  function labels(marks, frame) {
    const taken = marks.map((m) => [m.px - 8, m.py - 8, m.px + 8, m.py + 8]);
    const rank = (m) => (m.taken ? 0 : m.base ? 1 : m.front ? 2 : 3);
    const made = [];
    for (const mark of [...marks].sort((a, b) => rank(a) - rank(b))) {
      const name = mark.name.length > 30 ? `${mark.name.slice(0, 29)}…` : mark.name;
      const length = name.length * (mark.taken ? 7.6 : 6.6);
      const reach = marks.length > MANY && rank(mark) > 2 ? REACHES.slice(0, 2) : REACHES;
      const place = free(mark, length, taken, frame, reach) ?? (mark.taken ? above(mark, length, frame) : null);
      if (!place) continue;
      taken.push(place.box);
      if (place.far) made.push(draw("line", { class: "leader", x1: mark.px, y1: mark.py, x2: place.x, y2: place.y, "aria-hidden": "true" }));
      const style = { class: mark.taken ? "name taken" : "name", x: place.x, y: place.y, dy: "0.35em", "text-anchor": place.anchor, "aria-hidden": "true" };
      made.push(draw("text", style, name));
    }
    return made;
  }

  function free(mark, length, taken, frame, reach) {
    for (const distance of reach) {
      for (const [dx, dy] of [[1, 0], [-1, 0], [0.8, -0.7], [0.8, 0.7], [-0.8, -0.7], [-0.8, 0.7], [0, -1.1], [0, 1.1]]) {
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

  // Where nothing is free, the recommended name stands over whatever is there.
  function above(mark, length, frame) {
    const x = Math.max(frame.left + length / 2, Math.min(mark.px, frame.right - length / 2));
    const y = mark.py - 20;
    return { x, y, box: [x - length / 2, y - 8, x + length / 2, y + 8], far: false, anchor: "middle" };
  }

  function facts(mark, x, y) {
    const kept = [...new Set([x, y, "speedup", "score_delta"])].filter((name) => mark.cells[name]);
    return kept.map((name) => [data.metrics[name].title, withUnit(name, mark.cells[name]), interval(name, mark.cells[name])]);
  }

  function remarks(mark) {
    return [mark.taken && "recommended", mark.base && "the baseline", mark.front ? "on the frontier" : "not on the frontier"].filter(Boolean).join(", ");
  }

  function targets(marks, x, y, tip, group) {
    const ordered = [...marks].sort((a, b) => a.px - b.px || a.py - b.py);
    const entry = Math.max(0, ordered.findIndex((mark) => mark.taken));
    const links = ordered.map((mark, number) => {
      const told = facts(mark, x, y).map((fact) => fact.filter(Boolean).join(" ")).join("; ");
      const link = draw("a", {
        href: `#recipe-${mark.recipe}`, tabindex: number === entry ? "0" : "-1",
        "aria-label": `${mark.name}, ${data.groups[group].title}: ${told}; ${remarks(mark)}`,
      });
      link.append(draw("circle", { cx: mark.px, cy: mark.py, r: 12 }));
      const open = () => tell(tip, link, mark, x, y);
      link.addEventListener("pointerenter", open);
      link.addEventListener("focus", open);
      link.addEventListener("pointerleave", () => close(tip, link));
      link.addEventListener("blur", () => close(tip, link));
      link.addEventListener("keydown", (event) => move(event, links, number, tip));
      link.addEventListener("click", (event) => {
        if (event.pointerType !== "touch" || armed === link) return;
        armed = link;
        event.preventDefault();
        event.stopPropagation();
      });
      return link;
    });
    return links;
  }

  function move(event, links, number, tip) {
    const last = links.length - 1;
    const to = {
      ArrowRight: Math.min(last, number + 1), ArrowDown: Math.min(last, number + 1),
      ArrowLeft: Math.max(0, number - 1), ArrowUp: Math.max(0, number - 1), Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape") close(tip, links[number]);
    if (to === undefined) return;
    event.preventDefault();
    links[number].setAttribute("tabindex", "-1");
    links[to].setAttribute("tabindex", "0");
    links[to].focus();
  }

  function tell(tip, link, mark, x, y) {
    for (const other of link.ownerSVGElement.querySelectorAll("a.on")) other.classList.remove("on");
    link.classList.add("on");
    const lines = facts(mark, x, y).map((fact) => make("tr", {}, ...fact.map((words) => make("td", {}, words))));
    tip.replaceChildren(make("b", {}, mark.name), make("table", {}, make("tbody", {}, ...lines)), make("p", {}, remarks(mark)));
    tip.hidden = false;
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    const room = holder.clientWidth;
    const left = mark.px + 16 + width <= room ? mark.px + 16 : mark.px - 16 - width;
    tip.style.left = `${Math.max(0, Math.min(left, room - width))}px`;
    tip.style.top = `${Math.max(-20, left < 0 ? mark.py + 18 : mark.py - height / 2)}px`;
  }

  function close(tip, link) {
    link.classList.remove("on");
    tip.hidden = true;
  }
}

// The interactive frontier: two metrics of one device and batch size, a mark a recipe, drawn by Observable Plot.
"use strict";

{
  const holder = document.getElementById("chart");
  const [across, up, on] = ["axis-x", "axis-y", "chart-group"].map((id) => document.getElementById(id));
  const MANY = 14; // of more marks than this only the telling ones have a name that stands afar
  const PEAKS = { cpu: "peak_rss_bytes", cuda: "peak_vram_bytes" };

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
    drawnIn(holder, show);
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
        recipe, name, cells, where: data.groups[group].title, front: Boolean(front),
        taken: name === data.groups[group].recommended, base: name === data.baseline,
        x: scaled(x, cells[x][0]), y: scaled(y, cells[y][0]),
        xs: cells[x].slice(1).map((value) => scaled(x, value)), ys: cells[y].slice(1).map((value) => scaled(y, value)),
      });
    }
    for (const mark of found) {
      const rank = mark.taken ? 0 : mark.base ? 1 : mark.front ? 2 : 3;
      const reach = found.length > MANY && rank > 2 ? REACHES.slice(0, 2) : REACHES;
      Object.assign(mark, { words: mark.name, rank, reach, bold: mark.taken, must: mark.taken });
    }
    return found;
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
    const marks = points(group, x, y);
    if (!marks.length) {
      const words = `Nothing to draw on ${data.groups[group].title}: no recipe has both ${data.metrics[x].title} and ${data.metrics[y].title} there.`;
      holder.replaceChildren(make("p", { class: "nothing" }, words));
      return;
    }
    const xAxis = axis(x, marks.map((m) => m.x), marks.flatMap((m) => m.xs));
    const yAxis = axis(y, marks.map((m) => m.y), marks.flatMap((m) => m.ys));
    const bar = { stroke: "var(--strong)", strokeWidth: 1.25, clip: true };
    const even = { stroke: "var(--muted)", strokeWidth: 1, clip: true };
    const layers = [
      x === "score_delta" ? Plot.ruleX([0], even) : null,
      y === "score_delta" ? Plot.ruleY([0], even) : null,
      Plot.line(stairs(marks, xAxis, yAxis), { curve: "step-after", stroke: "var(--accent)", strokeWidth: 1.5, strokeDasharray: "6 4", clip: true }),
      Plot.ruleY(marks.filter((m) => m.xs.length), { ...bar, y: "y", x1: (m) => m.xs[0], x2: (m) => m.xs[1] }),
      Plot.ruleX(marks.filter((m) => m.ys.length), { ...bar, x: "x", y1: (m) => m.ys[0], y2: (m) => m.ys[1] }),
      ...[false, true].map((front) => dots(marks.filter((m) => m.front === front && !m.taken), front)).flat(),
      Plot.dot(marks.filter((m) => m.taken), { x: "x", y: "y", symbol: "star", r: 9, fill: "var(--star)", stroke: "var(--paper)", strokeWidth: 1 }),
    ];
    const title = `${data.metrics[y].title} against ${data.metrics[x].title}, ${data.groups[group].title}: ${marks.length} recipes`;
    const plot = plotted(Math.max(300, holder.clientWidth), xAxis, yAxis, layers, marks, title);
    const tip = make("div", { class: "tip", hidden: "" });
    const ordered = [...marks].sort((a, b) => a.px - b.px || a.py - b.py);
    plot.append(...targets(ordered, { holder, tip, radius: 12, metrics: [x, y, "speedup", "score_delta"], remarks }));
    holder.replaceChildren(plot, tip);
  }

  function dots(marks, front) {
    const style = { x: "x", y: "y", fill: front ? "var(--accent)" : "var(--paper)", stroke: front ? "var(--accent)" : "var(--ink)", strokeWidth: 1.5 };
    return [
      Plot.dot(marks.filter((m) => !m.base), { ...style, symbol: "circle", r: 5 }),
      Plot.dot(marks.filter((m) => m.base), { ...style, symbol: "square", r: 6 }),
    ];
  }

  function remarks(mark) {
    return [mark.taken && "recommended", mark.base && "the baseline", mark.front ? "on the frontier" : "not on the frontier"].filter(Boolean).join(", ");
  }
}

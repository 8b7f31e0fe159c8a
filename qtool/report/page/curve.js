// Latency and throughput: a line a recipe over the batch sizes of one device, a mark a batch size.
"use strict";

if (document.getElementById("curve-chart")) {
  const holder = document.getElementById("curve-chart");
  const [on, which] = ["curve-device", "curve-recipe"].map((id) => document.getElementById(id));
  const [X, Y] = ["latency_p50_s", "throughput_per_s"];
  const FEW = 8; // so many lines all bear words; of more only the recommended and the baseline's

  const all = points();
  const devices = [...new Set(all.map((mark) => mark.device))];
  fill(on, devices.map((device) => [device, device]), devices[0]);
  if (devices.length < 2) on.parentElement.hidden = true;
  choices();
  on.addEventListener("change", () => {
    choices();
    show();
  });
  which.addEventListener("change", show);
  drawnIn(holder, show);

  // Marks of the recipes that finished at two batch sizes of a device, line by line, small batches first.
  function points() {
    const found = [];
    for (const [recipe, of, , listed] of data.rows) {
      const { [X]: x, [Y]: y } = named(listed);
      if (!x || !y) continue;
      const name = data.recipes[recipe];
      const { place: device, batch, title, recommended } = data.groups[of];
      found.push({
        recipe, name, device, batch, title: `${name}, batch ${batch}`, where: title, cells: named(listed),
        taken: name === recommended, base: name === data.baseline, x: scaled(X, x[0]), y: scaled(Y, y[0]),
      });
    }
    const isLine = (mark) => found.filter((other) => other.recipe === mark.recipe && other.device === mark.device).length > 1;
    return found.filter(isLine).sort((a, b) => a.recipe - b.recipe || a.batch - b.batch);
  }

  // The device's recipes; the one that was chosen stays, where this device has it.
  function choices() {
    const chosen = which.value;
    const recipes = [...new Set(all.filter((mark) => mark.device === on.value).map((mark) => mark.recipe))];
    which.replaceChildren();
    fill(which, [["", "all"], ...recipes.map((recipe) => [String(recipe), data.recipes[recipe]])], recipes.includes(Number(chosen)) ? chosen : "");
  }

  function show() {
    const own = all.filter((mark) => mark.device === on.value);
    const marks = own.filter((mark) => which.value === "" || mark.recipe === Number(which.value)).map((mark) => ({ ...mark }));
    const chosen = new Set(marks.filter((mark) => mark.taken).map((mark) => mark.recipe));
    const lines = new Set(marks.map((mark) => mark.recipe)).size;
    for (const mark of marks) {
      mark.weight = chosen.has(mark.recipe) ? 0 : mark.base ? 1 : lines === 1 ? 0 : 2;
      const isLast = mark.batch === Math.max(...marks.filter((other) => other.recipe === mark.recipe).map((other) => other.batch));
      const isNamed = isLast && (mark.weight < 2 || lines <= FEW);
      mark.words = isNamed ? `${mark.name}, ${mark.batch}` : mark.weight < 2 || lines <= FEW ? String(mark.batch) : "";
      mark.sides = isNamed ? BESIDE : OVER;
      mark.bold = isNamed && mark.weight === 0;
      mark.must = isNamed && mark.weight < 2;
      mark.rank = isNamed ? mark.weight : 3 + mark.weight;
      mark.quiet = mark.weight > 1;
      mark.reach = isNamed ? REACHES : [16, 22];
    }
    // the axes hold every recipe, so that one that is shown alone stands where it stood
    const xAxis = axis(X, own.map((m) => m.x));
    const yAxis = axis(Y, own.map((m) => m.y));
    const title = `throughput against latency over batch sizes, ${on.value}: ${lines} ${lines === 1 ? "recipe" : "recipes"}`;
    const plot = plotted(Math.max(300, holder.clientWidth), xAxis, yAxis, layers(marks), marks, title);
    const traced = draw("path", { class: "traced", "aria-hidden": "true" });
    const tip = make("div", { class: "tip", hidden: "" });
    const opened = (told) => {
      const line = told ? marks.filter((mark) => mark.recipe === told.recipe) : [];
      traced.setAttribute("d", line.map((mark, i) => `${i ? "L" : "M"}${mark.px},${mark.py}`).join(""));
    };
    const metrics = [X, "latency_p95_s", Y, "speedup"];
    const links = targets(marks, { holder, tip, radius: 9, metrics, remarks, opened });
    const weights = new Map(links.map((link, number) => [link, marks[number].weight]));
    // where links overlap, a pointer meets the strong ones; the arrow keys keep to the lines
    plot.append(traced, ...[...links].sort((a, b) => weights.get(b) - weights.get(a)));
    holder.replaceChildren(plot, tip);
  }

  // The quiet ones first, so that what matters lies on top.
  function layers(marks) {
    const styles = [
      { stroke: "var(--accent)", strokeWidth: 2.5 },
      { stroke: "var(--ink)", strokeWidth: 2, strokeDasharray: "6 3" },
      { stroke: "var(--strong)", strokeWidth: 1, strokeOpacity: 0.6 },
    ];
    const found = [];
    for (const weight of [2, 1, 0]) {
      const own = marks.filter((mark) => mark.weight === weight);
      const { stroke, strokeOpacity } = styles[weight];
      const dot = { x: "x", y: "y", fill: weight ? "var(--paper)" : stroke, stroke, strokeOpacity, strokeWidth: 1.5 };
      found.push(Plot.line(own, { x: "x", y: "y", z: "recipe", ...styles[weight] }));
      found.push(Plot.dot(own.filter((m) => !m.base && !m.taken), { ...dot, symbol: "circle", r: weight < 2 ? 4.5 : 3 }));
      found.push(Plot.dot(own.filter((m) => m.base && !m.taken), { ...dot, symbol: "square", r: 5.5 }));
    }
    found.push(Plot.dot(marks.filter((m) => m.taken), { x: "x", y: "y", symbol: "star", r: 8, fill: "var(--star)", stroke: "var(--paper)", strokeWidth: 1 }));
    return found;
  }

  function remarks(mark) {
    return [mark.taken && "recommended", mark.base && "the baseline"].filter(Boolean).join(", ");
  }
}

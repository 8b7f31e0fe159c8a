// The recipes' parts: latency by round and the answers that changed, made when a part is opened.
"use strict";

{
  const parts = [...document.querySelectorAll("details.recipe")];
  for (const part of parts) {
    part.addEventListener("toggle", () => {
      if (part.open && !part.dataset.made) complete(part);
    });
  }
  addEventListener("hashchange", reveal);
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href^='#recipe-']");
    if (link) open(link.getAttribute("href").slice(1));
  });
  reveal();

  function reveal() {
    open(location.hash.slice(1));
    if (location.hash.startsWith("#recipe-")) document.getElementById(location.hash.slice(1))?.scrollIntoView();
  }

  function open(id) {
    const part = parts.find((each) => each.id === id);
    if (part) part.open = true;
  }

  function complete(part) {
    part.dataset.made = "1";
    const recipe = part.dataset.recipe;
    const rounds = part.querySelector("[data-rounds]");
    if (!rounds) return;
    const timed = Object.entries(data.timed[recipe] ?? {});
    for (const [group, found] of timed) rounds.append(strip(data.groups[group].title, found, rounds.clientWidth, timed.length > 1));
    if (timed.length) rounds.append(make("p", { class: "note" }, legend(timed.flatMap(([, found]) => found))));
    else rounds.parentElement.hidden = true;
    part.querySelector("[data-flips]").append(...changes(Number(recipe)));
  }

  function legend(rounds) {
    const isCorrected = rounds.some((round) => round.corrected);
    const texts = isCorrected ? ", corrected for the texts it holds" : "";
    return `Light band: p5 to p95 of a round's calls; darker: p25 to p75; bar: p50; cross: p99, where there are calls enough. Dots: the median of each tenth of the round in its order${texts}: a slope is drift within a process, a step is a difference between processes.`;
  }

  // One small drawing a device and batch size: a box a round, and the course of the round across it.
  function strip(title, rounds, room, isOneOfMany) {
    const ms = (value) => (value === null ? null : value * 1e3);
    const boxes = rounds.map((round, number) => {
      const [p5, p25, p50, p75, p95, p99] = round.quantiles.map(ms);
      return { left: number, right: number + 0.86, p5, p25, p50, p75, p95, p99, name: `round ${round.round}` };
    });
    const course = rounds.flatMap((round, number) =>
      round.stretches.map((value, i) => ({ x: number + (0.86 * (i + 0.5)) / round.stretches.length, y: ms(value), number })),
    );
    const whole = (low, high) => boxes.filter((box) => box[low] !== null && box[high] !== null);
    const band = (low, high, color) => Plot.rect(whole(low, high), { x1: "left", x2: "right", y1: low, y2: high, fill: color });
    const width = Math.max(280, Math.min(room, isOneOfMany ? 350 : 620));
    const plot = Plot.plot({
      width, height: isOneOfMany ? 150 : 190, marginLeft: 46, marginRight: 4, marginTop: 12, marginBottom: 22,
      style: { background: "none", fontSize: "11px", fontFamily: "inherit" },
      x: { domain: [-0.07, rounds.length - 0.07] },
      marks: [
        Plot.gridY({ stroke: "var(--line)", strokeOpacity: 1, ticks: 4 }),
        Plot.axisY({ ticks: 4, tickSize: 0, label: null, tickFormat: (value) => Number(value.toPrecision(6)).toLocaleString("en-US") }),
        Plot.axisX({ ticks: boxes.map((box) => box.left + 0.43), tickSize: 0, label: null, tickFormat: (_, i) => (rounds.length > 6 ? String(rounds[i].round) : boxes[i].name) }),
        band("p5", "p95", "var(--band-soft)"),
        band("p25", "p75", "var(--band)"),
        Plot.ruleY(whole("p50", "p50"), { y: "p50", x1: "left", x2: "right", stroke: "var(--accent)", strokeWidth: 2 }),
        Plot.dot(whole("p99", "p99"), { x: (box) => box.left + 0.43, y: "p99", symbol: "times", r: 3.5, stroke: "var(--muted)" }),
        Plot.line(course, { x: "x", y: "y", z: "number", stroke: "var(--ink)", strokeWidth: 1 }),
        Plot.dot(course, { x: "x", y: "y", r: 1.8, fill: "var(--ink)" }),
      ],
    });
    const told = rounds.map((round) => `round ${round.round}: p50 ${significant(ms(round.quantiles[2]) ?? NaN)}${round.quantiles[4] === null ? "" : `, p95 ${significant(ms(round.quantiles[4]))}`}`);
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${title}, ms, ${told.join("; ")}`);
    return make("figure", {}, make("figcaption", {}, `${title}, ms`), plot);
  }

  function changes(recipe) {
    const found = [];
    for (const [device, recipes] of Object.entries(data.changed.devices)) {
      const own = recipes[recipe];
      if (!own) continue;
      const where = Object.keys(data.changed.devices).length > 1 ? ` on ${device}` : "";
      found.push(make("h4", {}, `${data.changed.classes ? "Answers" : "Outputs"} that changed${where}`));
      found.push(make("p", {}, counted(own)));
      if (own.first.length) found.push(listed(device, recipe, own));
    }
    return found;
  }

  function counted({ changed, gained, lost, first }) {
    if (!changed) return data.changed.classes ? "None: every example has the baseline's answer." : "None: every output is the baseline's.";
    const more = changed - first.length;
    const rest = more ? ` Shown are the first ${first.length}, ${more} more are in the run's predictions.` : "";
    if (gained === null) return `${changed} ${changed === 1 ? "output differs" : "outputs differ"} from the baseline's, the largest change first.${rest}`;
    const other = changed - gained - lost;
    const wrong = other ? `, ${other} wrong before and after` : "";
    return `${changed} changed: ${gained} gained, ${lost} lost${wrong}. The most confident first, by both answers' probabilities.${rest}`;
  }

  function listed(device, recipe, own) {
    const isClassifier = own.gained !== null;
    const caption = `Examples whose ${isClassifier ? "answer" : "output"} changed`;
    const titles = ["text", "label", data.baseline, data.recipes[recipe], ...(isClassifier ? ["verdict"] : [])];
    const head = make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title)));
    const lines = own.first.map((entry) => line(device, entry, isClassifier));
    const table = make("table", { class: "plain flips" }, make("caption", { class: "hidden" }, caption), make("thead", {}, head), make("tbody", {}, ...lines));
    return make("div", { class: "scroll tall some", role: "region", tabindex: "0", "aria-label": caption }, table);
  }

  function line(device, entry, isClassifier) {
    const [id, label] = data.changed.examples[device][entry[0]];
    const texts = data.changed.texts[entry[0]] ?? [];
    const text = texts.length ? texts.flatMap((words, i) => (i ? [make("br"), words] : [words])) : [`example ${id}`];
    const cells = [make("td", {}, ...text)];
    if (!isClassifier) {
      cells.push(...[label, entry[1], entry[2]].map((value) => make("td", {}, significant(value))));
      return make("tr", {}, ...cells);
    }
    const [, old, oldP, own, ownP] = entry;
    const answer = (number, p) => make("td", {}, answerOf(number), " ", make("span", { class: "muted" }, `${(100 * p).toFixed(1)} %`));
    const verdict = own === label ? "gained" : old === label ? "lost" : "still wrong";
    cells.push(make("td", {}, answerOf(label)), answer(old, oldP), answer(own, ownP));
    cells.push(make("td", { class: `verdict ${verdict}` }, verdict));
    return make("tr", {}, ...cells);
  }

  function answerOf(number) {
    return data.changed.classes[number] ?? String(number);
  }
}

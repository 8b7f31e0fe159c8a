// The page's data, how a number is written (as units.py writes it), and small helpers that build elements.
// Nothing here or in the other scripts ever makes markup from a string: text goes in as text.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const NOTHING = "-";

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

// Rounded as Python rounds: an exact half goes to the even digit.
function fixed(value, digits) {
  const style = { minimumFractionDigits: digits, maximumFractionDigits: digits, roundingMode: "halfEven" };
  return value.toLocaleString("en-US", style);
}

// Three significant digits without an exponent: 0.0271, 2.71, 27.1, 271, 2,714.
function significant(value) {
  if (value === 0) return "0";
  return fixed(value, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)))));
}

function scaled(name, value) {
  const { scale } = data.metrics[name];
  return scale < 1 ? value / Math.round(1 / scale) : value * scale;
}

function number(name, value) {
  const { form } = data.metrics[name];
  const shown = scaled(name, value);
  if (form === "significant") return significant(shown);
  if (form === "ratio") return shown < 0.01 ? "<0.01" : shown > 1000 ? ">1000" : significant(shown);
  if (form === "points" || form === "signed") {
    return (shown < 0 ? "-" : "+") + fixed(Math.abs(shown), form === "points" ? 2 : 4);
  }
  return fixed(shown, form === "fixed2" ? 2 : 4);
}

function withUnit(name, cell) {
  if (!cell) return NOTHING;
  const unit = data.metrics[name].unit;
  return number(name, cell[0]) + (unit && unit !== "x" ? " " : "") + unit;
}

function interval(name, cell) {
  return cell && cell.length === 3 ? `[${number(name, cell[1])}, ${number(name, cell[2])}]` : "";
}

// A row's cells by metric; they are listed in the order of the metrics, null where there is no number.
function named(cells) {
  return Object.fromEntries(Object.keys(data.metrics).map((name, i) => [name, cells[i]]));
}

function axisTitle(name) {
  const { title, unit } = data.metrics[name];
  return unit ? `${title}, ${unit}` : title;
}

function fill(select, options, chosen) {
  for (const [value, title] of options) select.append(new Option(title, value, false, value === chosen));
}

// Runs once things stand still: a window that is dragged is drawn when it rests.
function settled(task, wait = 120) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(task, wait);
  };
}

document.documentElement.classList.add("js");

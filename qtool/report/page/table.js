// The table: sorting by the buttons of its header, filters, and a line that tells how many rows are shown.
"use strict";

{
  const table = document.getElementById("results");
  const body = table.tBodies[0];
  const planned = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const filters = [...document.querySelectorAll("[data-filter]")];
  let sorted = "";

  heads.forEach((head, column) => {
    const button = make("button", { type: "button" }, head.textContent);
    head.replaceChildren(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => sort(head, column, button.textContent));
  });

  function sort(head, column, title) {
    const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const other of heads) other.setAttribute("aria-sort", other === head ? order : "none");
    const sign = order === "ascending" ? 1 : -1;
    const key = head.dataset.kind === "number" ? numeric : textual;
    const keyed = planned.map((row) => [key(row.cells[column]), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // what is missing comes last either way
      return sign * (typeof a === "number" ? a - b : a.localeCompare(b, "en"));
    });
    body.append(...keyed.map(([, row]) => row));
    sorted = `, sorted by ${title}, ${order}`;
    tell();
  }

  function numeric(cell) {
    return cell.dataset.v === undefined ? null : Number(cell.dataset.v);
  }

  function textual(cell) {
    return cell.dataset.v ?? cell.textContent.trim();
  }

  function filter() {
    for (const row of planned) {
      row.hidden = !filters.every((control) => {
        const held = row.dataset[control.dataset.filter];
        return control.type === "checkbox" ? !control.checked || held === "1" : !control.value || held === control.value;
      });
    }
    tell();
  }

  function tell() {
    const shown = planned.filter((row) => !row.hidden).length;
    document.getElementById("shown").textContent = `${shown} of ${planned.length} rows${sorted}`;
  }

  for (const control of filters) control.addEventListener("change", filter);
  tell();
}

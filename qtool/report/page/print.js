// Paper cannot be opened: what is closed on screen is opened before printing and closed again after it. Of a long
// list of recipes only the telling ones, marked `data-paper`, and those left open are printed, and a line says so.
"use strict";

{
  const MANY = 10;
  const parts = [...document.querySelectorAll("details")];
  const recipes = parts.filter((part) => part.matches(".recipe"));
  const note = document.getElementById("on-paper");
  let opened = [];

  addEventListener("beforeprint", () => {
    const isLong = recipes.length > MANY;
    const added = parts.filter((part) => !part.open && !(isLong && part.matches(".recipe:not([data-paper])")));
    for (const part of added) {
      part.open = true;
      part.dispatchEvent(new Event("toggle")); // the browser's own comes too late for the paper
    }
    opened.push(...added);
    const left = recipes.filter((part) => !part.open).length;
    note.textContent = left ? `Printed are the recommended recipes, the baseline and those left open; ${left} more stand in the table above and in the file.` : "";
    document.documentElement.classList.add("paper");
  });

  addEventListener("afterprint", () => {
    for (const part of opened) part.open = false;
    opened = [];
    note.textContent = "";
    document.documentElement.classList.remove("paper");
  });
}

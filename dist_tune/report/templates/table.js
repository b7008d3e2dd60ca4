// Tables: a click on a heading sorts by it, the field above filters rows by words that all must occur.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
    const isDown = heading.getAttribute("aria-sort") === "ascending";
    headings.forEach(each => each.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const keyed = [...body.rows].map(row => {
      const text = row.cells[column].textContent;
      return { row, text, value: text === "" ? NaN : Number(text) };
    });
    keyed.sort((a, b) => {
      const isNumber = [!isNaN(a.value), !isNaN(b.value)];
      if (isNumber[0] !== isNumber[1]) return isNumber[0] ? -1 : 1;  // what has no number comes last, both ways
      const order = isNumber[0] ? a.value - b.value : a.text.localeCompare(b.text);
      return isDown ? -order : order;
    });
    body.append(...keyed.map(each => each.row));
  }));
  const filter = table.closest("details").querySelector("input");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
  });
}
const target = location.hash && document.getElementById(location.hash.slice(1));
if (target instanceof HTMLDetailsElement) target.open = true;
for (const link of document.querySelectorAll("a[href^='#']")) {
  link.addEventListener("click", () => { document.getElementById(link.hash.slice(1)).open = true; });
}

/* Tables: wide columns for sentences; rows filtered by words, and sorted by a click on a heading. */
"use strict";

const LONG = 12; // rows from which a table gets a filter
const SENTENCE = 60; // characters from which a cell's column stays wide on a narrow screen

function value(row, column) {
  const text = (row.cells[column]?.textContent ?? "").trim();
  const plain = text.replace(/,/g, "").replace(/^\u2212/, "-"); // the minus of typography
  const number = plain.match(/^[-+]?\d+(\.\d+)?(e-?\d+)?/);
  return number ? Number(number[0]) : text.toLowerCase();
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === typeof b) return a < b ? -1 : Number(a > b);
  return typeof a === "number" ? -1 : 1; // numbers before texts
}

function makeSortable(table) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    if (!heading.textContent.trim()) return;
    heading.querySelectorAll("a").forEach((link) => link.replaceWith(...link.childNodes));
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort-by";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows];
      rows.sort((a, b) => (down ? -1 : 1) * compare(value(a, column), value(b, column)));
      body.append(...rows);
    });
  });
}

function widenSentences(table) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const cells = [...table.tBodies[0].rows].map((row) => row.cells[column]);
    const long = cells.some((cell) => cell && cell.textContent.length > SENTENCE);
    heading.classList.toggle("sentences", long);
  });
}

function makeFilter(tables, before) {
  const label = document.createElement("label");
  label.className = "filter-rows";
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "one or more words";
  const count = document.createElement("output");
  label.append("Filter the rows: ", input, " ", count);
  before.before(label);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const table of tables) {
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
    }
    count.textContent = input.value ? `${shown} ${shown === 1 ? "row" : "rows"}` : "";
  });
}

document.addEventListener("DOMContentLoaded", () => {
  const tables = [...document.querySelectorAll("article table")].filter(
    (table) => table.tHead && table.tBodies.length === 1 && !table.closest(".interactive"),
  );
  tables.forEach(widenSentences);
  tables.filter((table) => table.tBodies[0].rows.length >= 3).forEach(makeSortable);
  const long = tables.filter((table) => table.tBodies[0].rows.length >= LONG);
  if (long.length) {
    const first = long[0].closest(".table-wrapper") ?? long[0];
    makeFilter(tables, first);
  }
});

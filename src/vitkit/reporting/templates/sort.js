"use strict";
// Sorts a table by the column of the button that is pressed; cells without a value come last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = Array.from(table.tHead.rows[0].cells);
  const order = new Intl.Collator("en", { numeric: true }).compare;
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value ?? cell.textContent.trim();
  };
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => {
        if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      });
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const numeric = head.classList.contains("number");
      const compare = (first, second) => {
        const a = value(first, column), b = value(second, column);
        if (a === "" || b === "") return (a === "") - (b === "");
        const difference = numeric ? Number(a) - Number(b) : order(a, b);
        return descending ? -difference : difference;
      };
      body.append(...Array.from(body.rows).sort(compare));
    });
  });
}

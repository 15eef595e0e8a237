/* Small parts that the pages share: elements, coloured cells, numbers. */
"use strict";

globalThis.figures = (() => {
  /* An element with attributes and children; a text is never read as HTML. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  /* Colour a cell by a share from 0 to 1; the style sheet mixes the colour (`--share`), and above
   * `dark` the text changes its own. */
  function paint(cell, share, { dark = 0.795 } = {}) {
    cell.style.setProperty("--share", Math.min(1, Math.max(0, share)).toFixed(3));
    if (share > dark) cell.classList.add("on-dark");
    else cell.classList.remove("on-dark");
  }

  /* A table with a heading for every row and column; returns its cells, row by row. */
  function matrix(table, { rows, columns, corner = "", caption = "" }) {
    table.replaceChildren();
    if (caption) table.append(element("caption", {}, caption));
    const head = columns.map((name) => element("th", { scope: "col" }, name));
    table.append(element("thead", {}, element("tr", {}, element("td", {}, corner), ...head)));
    const body = element("tbody");
    table.append(body);
    return rows.map((name) => {
      const cells = columns.map(() => element("td"));
      body.append(element("tr", {}, element("th", { scope: "row" }, name), ...cells));
      return cells;
    });
  }

  /* Cells without headings, for a small picture of rows of numbers. */
  function picture(box, rows, columns) {
    box.style.setProperty("--columns", columns);
    box.replaceChildren(...Array.from({ length: rows * columns }, () => element("i")));
    return [...box.children];
  }

  const percent = (share) => `${(100 * share).toFixed(share >= 0.0995 ? 0 : 1)} %`;
  const decimals = (value, places) => value.toFixed(places).replace(/^-(0\.?0*)$/, "$1")
    .replace("-", "\u2212");

  return { decimals, element, matrix, paint, percent, picture };
})();

/* Chapter 2: softmax(Q K^T / sqrt(d)) V with numbers that can be changed. */
"use strict";

for (const box of document.querySelectorAll(".attention-example")) {
  const find = (name) => box.querySelector(`[data-part="${name}"]`);
  const NAMES = { q: "query", k: "key", v: "value" };
  const inputs = {};
  const cellsOf = (name) => [...find(name).tBodies[0].rows].map((row) =>
    [...row.cells].filter((cell) => cell.tagName === "TD"));

  /* Each number of the table becomes a field. */
  function makeFields(name) {
    inputs[name] = cellsOf(name).map((cells, i) => cells.map((cell, j) => {
      const field = figures.element("input", { type: "number", step: "0.5",
        value: cell.textContent, "aria-label": `${NAMES[name]} ${i + 1}, number ${j + 1}` });
      field.addEventListener("input", show);
      cell.replaceChildren(field);
      return field;
    }));
  }

  const numbers = (name) => inputs[name].map((row) => row.map((field) => Number(field.value)));

  function show() {
    const [q, k, v] = ["q", "k", "v"].map(numbers);
    const divided = find("divided").checked;
    const scale = divided ? Math.sqrt(q[0].length) : 1;
    const scores = q.map((a) => k.map((b) =>
      a.reduce((sum, value, i) => sum + value * b[i], 0) / scale));
    const weights = scores.map((row) => vit.softmax(row));
    const outputs = weights.map((row) => v[0].map((_, i) =>
      v.reduce((sum, value, j) => sum + row[j] * value[i], 0)));
    find("scale").textContent = divided ? `divided by the root of ${q[0].length}` : "not divided";
    write("scores", scores, 2);
    write("weights", weights, 4);
    write("outputs", outputs, 2);
    cellsOf("weights").forEach((cells, i) => cells.forEach((cell, j) =>
      figures.paint(cell, weights[i][j])));
  }

  const write = (name, values, places) => cellsOf(name).forEach((cells, i) =>
    cells.forEach((cell, j) => { cell.textContent = figures.decimals(values[i][j], places); }));

  function reset() {
    for (const field of Object.values(inputs).flat(2)) field.value = field.defaultValue;
    find("divided").checked = true;
    show();
  }

  Object.keys(NAMES).forEach(makeFields);
  find("divided").addEventListener("change", show);
  find("reset").addEventListener("click", reset);
  find("controls").hidden = false;
  show();
}

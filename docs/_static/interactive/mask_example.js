/* Chapter 10: a mask of 6 queries and 6 keys, to click on, and the weights that are left. */
"use strict";

for (const box of document.querySelectorAll(".mask-example")) {
  const find = (name) => box.querySelector(`[data-part="${name}"]`);
  const scores = JSON.parse(box.dataset.scores);
  const size = scores.length;
  const square = (allowed) => scores.map((row, i) => row.map((_, j) => allowed(i, j)));
  const PRESETS = {
    none: () => true,
    causal: (i, j) => j <= i,
    padding: (i, j) => j < size - 2,
    both: (i, j) => j <= i && j < size - 2,
    front: (i, j) => j <= i && j >= 2,
  };
  let mask = square(PRESETS.causal);
  const cellsOf = (name) => [...find(name).tBodies[0].rows].map((row) =>
    [...row.cells].filter((cell) => cell.tagName === "TD"));

  /* The softmax over the allowed keys alone; no key, no weight. */
  function softmaxOfAllowed(row, allowed) {
    const kept = row.filter((_, j) => allowed[j]);
    const weights = kept.length ? [...vit.softmax(kept)] : [];
    return row.map((_, j) => (allowed[j] ? weights.shift() : 0));
  }

  function makeButtons() {
    return cellsOf("mask").map((cells, i) => cells.map((cell, j) => {
      const button = figures.element("button", { type: "button",
        "aria-label": `query ${i + 1} may look at key ${j + 1}, score ${scores[i][j]}` });
      button.addEventListener("click", () => { mask[i][j] = !mask[i][j]; show(); });
      cell.replaceChildren(button);
      return button;
    }));
  }

  const buttons = makeButtons();

  function show() {
    const weights = scores.map((row, i) => softmaxOfAllowed(row, mask[i]));
    buttons.forEach((row, i) => row.forEach((button, j) => {
      button.setAttribute("aria-pressed", mask[i][j]);
      button.textContent = mask[i][j] ? figures.decimals(scores[i][j], 1) : "\u2715";
    }));
    cellsOf("weights").forEach((cells, i) => cells.forEach((cell, j) => {
      cell.textContent = mask[i][j] ? figures.decimals(weights[i][j], 2) : "0";
      cell.classList.toggle("hidden-key", !mask[i][j]);
      figures.paint(cell, weights[i][j]);
    }));
    find("message").textContent = message();
    for (const button of find("presets").querySelectorAll("button")) {
      const same = JSON.stringify(square(PRESETS[button.value])) === JSON.stringify(mask);
      button.setAttribute("aria-pressed", same);
    }
  }

  /* What becomes of a query without a key. */
  function message() {
    const empty = mask.flatMap((row, i) => (row.some(Boolean) ? [] : [i + 1]));
    if (!empty.length) return "Every row has a key, so the weights of every row sum to 1.";
    const [who, its] = empty.length > 1
      ? [`Queries ${empty.join(", ")} have`, "their"] : [`Query ${empty[0]} has`, "its"];
    return `${who} no key. A softmax of nothing would be 0 / 0, which is NaN; vitkit makes all `
      + `${its} weights 0, so ${its} output is 0.`;
  }

  for (const button of find("presets").querySelectorAll("button")) {
    button.addEventListener("click", () => { mask = square(PRESETS[button.value]); show(); });
  }
  find("presets").hidden = false;
  show();
}

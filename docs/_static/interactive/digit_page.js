/* The page "Draw a digit": what the reader does changes `state`, and every change shows the model's
 * answer again. Nothing leaves the page, and nothing is loaded. */
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const app = document.getElementById("digit-app");
  const find = (name) => app.querySelector(`[data-part="${name}"]`);
  const model = vit.decode(digitModel);
  const { classes, depth, heads, mean, std, examples } = model;
  const tokenCount = 1 + (model.height / model.patch) * (model.width / model.patch);
  const state = {
    counts: examples[0].counts, example: null, layer: depth - 1, head: 0, token: 0,
    temperature: 1, positions: true, centred: true, mean, std,
  };
  const history = [];
  let waiting = 0;

  const change = (changes) => { Object.assign(state, changes); show(); };
  const pad = digitPad.make(find("pad"), ({ begins }) => {
    if (begins) remember();
    else change({ counts: counted(), example: null });
  });
  const grid = digitGrid.make(find("grid"), (index) => state.counts[index], (index, value) => {
    remember();
    forgetStrokes(state.counts.map((old, i) => (i === index ? value : old)), null);
  });
  const showBits = digitViews.bitmap(find("bitmap"), find("no-bitmap"));
  const views = [
    digitViews.bars(find("bars"), classes),
    digitViews.answer({ digit: find("digit"), words: find("words") }, find("spoken"), classes),
    digitViews.tokens(find("tokens"), tokenCount - 1, model.patch, (token) => change({ token })),
    digitViews.maps(find("maps"), model, tokenCount, (layer, head) => change({ layer, head })),
    digitViews.map(find("map"), tokenCount, (token) => change({ token })),
    digitViews.overlay(find("overlay"), model, find("overlay-words")),
    digitViews.blocks(find("blocks"), depth, classes),
  ];

  /* The drawing as counts, and its bitmap on the page. */
  function counted() {
    const bits = strokes.bitmap(pad.drawn, { centred: state.centred });
    showBits(bits);
    return strokes.count(bits);
  }

  /* What to go back to. */
  function remember() {
    history.push({ drawn: pad.drawn, behind: pad.behind, counts: state.counts,
      example: state.example });
    find("undo").disabled = false;
  }

  /* An image that does not come from the pen. */
  function forgetStrokes(counts, example) {
    pad.drawn = [];
    pad.behind = counts;
    pad.paint();
    showBits(null);
    change({ counts, example });
  }

  function undo() {
    const last = history.pop();
    find("undo").disabled = history.length === 0;
    if (!last) return;
    Object.assign(pad, { drawn: last.drawn, behind: last.behind });
    pad.paint();
    if (pad.drawn.length) change({ counts: counted(), example: null });
    else forgetStrokes(last.counts, last.example);
  }

  function clear() {
    remember();
    Object.assign(pad, { drawn: [], behind: null });
    pad.paint();
    change({ counts: counted(), example: null });
  }

  /* One answer for all that happens between two frames. */
  function show() {
    if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; answerNow(); });
  }

  function answerNow() {
    const image = strokes.normalise(strokes.grey(state.counts), model);
    const found = vit.forward(model, image, { positions: state.positions });
    found.probabilities = vit.softmax(found.logits, state.temperature);
    grid(state.counts);
    for (const view of views) view(found, state);
    find("hint").hidden = pad.drawn.length > 0;
    for (const name of ["layer", "head"]) {
      find(name).value = find(`${name}-value`).textContent = state[name] + 1;
    }
    for (const button of find("examples").children) {
      button.setAttribute("aria-pressed", button.value === String(state.example?.label));
    }
    app.dispatchEvent(new CustomEvent("answered", { detail: found }));
  }

  function makeExamples() {
    for (const example of examples) {
      const button = figures.element("button", { type: "button", value: example.label,
        "aria-label": `test image ${example.index}, a ${example.label}` });
      figures.picture(button, 8, 8).forEach((cell, i) =>
        figures.paint(cell, example.counts[i] / 16));
      button.addEventListener("click", () => {
        remember();
        forgetStrokes(example.counts, example);
      });
      find("examples").append(button);
    }
  }

  function listen() {
    find("undo").addEventListener("click", undo);
    find("clear").addEventListener("click", clear);
    find("centred").addEventListener("change", ({ target }) => {
      state.centred = target.checked;
      if (pad.drawn.length) change({ counts: counted() });
    });
    find("positions").addEventListener("change", ({ target }) =>
      change({ positions: target.checked }));
    find("temperature").addEventListener("input", ({ target }) => {
      const temperature = 2 ** Number(target.value);
      find("temperature-value").textContent = figures.decimals(temperature, 2);
      change({ temperature });
    });
    for (const name of ["layer", "head"]) {
      find(name).addEventListener("input", ({ target }) =>
        change({ [name]: Number(target.value) - 1 }));
    }
    // colours of a canvas are fixed when it is drawn
    const redraw = () => { pad.paint(); if (pad.drawn.length) counted(); };
    new MutationObserver(redraw).observe(document.body, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  makeExamples();
  listen();
  document.getElementById("digit-still").hidden = true;
  app.hidden = false;
  forgetStrokes(examples[7].counts, examples[7]);
});

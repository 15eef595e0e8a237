/* What the page "Draw a digit" shows of one answer of the model. Each view is made once, with its
 * element, and returns a function that shows the present `state` and what `vit.forward` gave. */
"use strict";

globalThis.digitViews = (() => {
  const { decimals, element, matrix, paint, percent, picture } = figures;
  const WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
  const best = (values) => values.indexOf(Math.max(...values));
  const tokenNames = (count) => ["class", ...Array.from({ length: count }, (_, i) => `${i + 1}`)];

  /* Ten bars: softmax(logits / t). */
  function bars(list, classes) {
    const rows = classes.map((name) => {
      const [share, logit, bar] = [element("span", { class: "share" }),
        element("span", { class: "logit" }), element("span", { class: "bar" })];
      list.append(element("li", {}, element("b", {}, name), bar, share, logit));
      return { share, logit, bar, item: list.lastChild };
    });
    return ({ logits, probabilities }) => rows.forEach(({ share, logit, bar, item }, i) => {
      bar.style.setProperty("--share", probabilities[i].toFixed(4));
      share.textContent = percent(probabilities[i]);
      logit.textContent = decimals(logits[i], 2);
      item.classList.toggle("top", i === best(probabilities));
    });
  }

  /* The answer in words, at once for the eyes, and after a pause for a screen reader. */
  function answer(shown, spoken, classes) {
    let waiting = 0;
    return ({ probabilities }, { counts, example }) => {
      const top = best(probabilities);
      const said = `${WORDS[top]}, ${percent(probabilities[top])}`;
      const label = example === null ? "" : ` The label of this test image is ${example.label}.`;
      const empty = counts.every((value) => value === 0);
      shown.digit.textContent = empty ? "\u2013" : classes[top];
      shown.words.textContent = empty
        ? `Nothing is drawn. The model answers all the same: ${said}.`
        : `The model reads a ${said}.${label}`;
      clearTimeout(waiting);
      waiting = setTimeout(() => { spoken.textContent = shown.words.textContent; }, 600);
    };
  }

  /* The 32 x 32 bitmap; of an image that was not drawn here there is none. */
  function bitmap(canvas, note) {
    return (bits) => {
      note.hidden = bits !== null;
      canvas.hidden = bits === null;
      if (bits === null) return;
      const ink = canvas.getContext("2d");
      const size = canvas.width / strokes.SIDE;
      ink.clearRect(0, 0, canvas.width, canvas.height);
      ink.fillStyle = getComputedStyle(canvas).color;
      bits.forEach((bit, i) => {
        if (bit) ink.fillRect(size * (i % 32), size * Math.floor(i / 32), size, size);
      });
    };
  }

  /* The tokens in the order in which the model reads them; one of them is the query. */
  function tokens(box, count, side, choose) {
    const pictures = tokenNames(count).map((name, token) => {
      const radio = element("input", { type: "radio", name: "digit-token", value: token });
      const image = element("span", { class: "pixels", "aria-hidden": "true" });
      const title = token ? `patch ${name}` : "class token";
      radio.addEventListener("change", () => choose(token));
      box.append(element("label", {}, radio, image, element("span", {}, title)));
      return { radio, cells: token ? picture(image, side, side) : image.append("cls") };
    });
    return ({ patches }, { token, mean, std }) => pictures.forEach(({ radio, cells }, i) => {
      radio.checked = i === token;
      cells?.forEach((cell, pixel) => paint(cell, patches[i - 1][pixel] * std + mean));
    });
  }

  /* A button for each layer and head, with its T x T weights in small. */
  function maps(box, { depth, heads }, count, choose) {
    const made = [];
    for (let layer = 0; layer < depth; layer++) {
      const row = element("div", { class: "layer" }, element("span", {}, `layer ${layer + 1}`));
      for (let head = 0; head < heads; head++) {
        const button = element("button", { type: "button",
          "aria-label": `layer ${layer + 1}, head ${head + 1}` });
        button.addEventListener("click", () => choose(layer, head));
        made.push({ layer, head, button, cells: picture(button, count, count) });
        row.append(button);
      }
      box.append(row);
    }
    return ({ attention }, state) => made.forEach(({ layer, head, button, cells }) => {
      const chosen = layer === state.layer && head === state.head;
      button.setAttribute("aria-pressed", chosen);
      cells.forEach((cell, i) =>
        paint(cell, attention[layer][head][Math.floor(i / count)][i % count]));
    });
  }

  /* The chosen map: a row for each query, a column for each key; a click chooses the query. */
  function map(table, count, choose) {
    const names = tokenNames(count - 1);
    const rows = matrix(table, { rows: names, columns: names });
    const title = element("caption");
    table.prepend(title);
    rows.forEach((cells, token) => {
      const row = cells[0].parentElement;
      row.addEventListener("click", () => choose(token));
      row.addEventListener("pointerenter", (event) =>
        event.pointerType === "mouse" && choose(token));
    });
    return ({ attention }, { layer, head, token }) => {
      title.textContent = `Layer ${layer + 1}, head ${head + 1}: rows are queries, columns keys`;
      attention[layer][head].forEach((row, query) => {
        rows[query][0].parentElement.classList.toggle("chosen", query === token);
        row.forEach((weight, key) => {
          rows[query][key].textContent = decimals(weight, 2);
          paint(rows[query][key], weight);
        });
      });
    };
  }

  /* The chosen row over the image: how much of each patch the query takes. */
  function overlay(box, { height, width, patch }, words) {
    const pixels = element("div", { class: "pixels", "aria-hidden": "true" });
    const cells = picture(pixels, height, width);
    const across = width / patch;
    const over = element("div", { class: "over" });
    over.style.setProperty("--columns", across);
    const square = (name) => element("span", name, element("b"));
    const squares = Array.from({ length: (height / patch) * across }, () => square({}));
    const classToken = square({ class: "class-token" });
    classToken.append(element("b", {}, "class"));
    over.append(...squares);
    box.append(classToken, element("div", { class: "stack" }, pixels, over));
    return ({ attention }, { counts, layer, head, token }) => {
      const row = attention[layer][head][token];
      cells.forEach((cell, i) => paint(cell, counts[i] / 16));
      [classToken, ...squares].forEach((one, key) => {
        one.firstChild.textContent = percent(row[key]);
        one.classList.toggle("query", key === token);
        paint(one, row[key]);
      });
      const name = token ? `Patch ${token}` : "The class token";
      const largest = best([...row]);
      const where = largest === token ? "itself" : largest ? `patch ${largest}` : "the class token";
      words.textContent =
        `${name} takes most from ${where}: ${percent(row[largest])} of what this head adds to it.`;
    };
  }

  /* What the head would answer if the model ended after each block. */
  function blocks(table, depth, classes) {
    const columns = ["answer", "probability"];
    const rows = Array.from({ length: depth }, (_, i) => `after block ${i + 1}`);
    const cells = matrix(table, { rows, columns });
    return ({ afterBlock }, { temperature }) => afterBlock.forEach((logits, layer) => {
      const probabilities = vit.softmax(logits, temperature);
      const top = best(probabilities);
      cells[layer][0].textContent = classes[top];
      cells[layer][1].textContent = percent(probabilities[top]);
    });
  }

  return { answer, bars, best, bitmap, blocks, map, maps, overlay, tokens };
})();

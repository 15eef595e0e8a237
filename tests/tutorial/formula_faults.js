// What is drawn wrongly in the formulas of a page, as a list of sentences.
const found = [];
const box = (element) => element.getBoundingClientRect();
for (const math of document.querySelectorAll("math")) {
  const say = (what) => found.push(`${math.dataset.latex}: ${what}`);
  const whole = box(math);
  const leaves = [...math.querySelectorAll("mi, mn, mo, mtext")].filter((e) => /\S/.test(e.textContent));
  for (const leaf of leaves) {
    const b = box(leaf);
    if (leaf.textContent !== "\u2061" && (b.width === 0 || b.height === 0)) say(`nothing drawn for ${leaf.textContent}`);
    if (b.left < whole.left - 3 || b.right > whole.right + 3) say(`${leaf.textContent} leaves the formula`);
  }
  for (const fence of math.querySelectorAll("mo[stretchy='true'], mo[fence='true']")) {
    const row = [...fence.parentElement.children].filter((e) => !e.matches("mo"));
    if (!row.length) continue;
    const top = Math.min(...row.map((e) => box(e).top)), bottom = Math.max(...row.map((e) => box(e).bottom));
    const ratio = box(fence).height / (bottom - top);
    if (ratio > 2.2) say(`${fence.textContent} is ${ratio.toFixed(1)} times as high as its content`);
  }
  for (const script of math.querySelectorAll("msub, msup, msubsup")) {
    const [base, first, second] = script.children;
    const lower = script.matches("msup") ? null : first, upper = script.matches("msup") ? first : second;
    if (lower && box(lower).bottom < box(base).bottom - 1) say("a subscript does not stand low");
    if (upper && box(upper).top > box(base).top + box(base).height * 0.6) say("a superscript does not stand high");
    for (const part of [lower, upper]) {
      if (part && box(part).left < box(base).right - 0.35 * box(base).width - 2) say("a script lies on its base");
    }
  }
  for (const over of math.querySelectorAll("mover")) {
    const [base, accent] = over.children;
    if (box(accent).top + box(accent).height / 2 > box(base).top + box(base).height / 2) say("an accent is not above");
  }
  for (const bar of math.querySelectorAll("mrow[style*='border-top']")) {
    if (box(bar).width < [...bar.children].reduce((sum, e) => sum + box(e).width, 0) - 1) say("a bar is too short");
  }
  for (const row of math.querySelectorAll("mrow, math")) {
    const parts = [...row.children].filter((e) => box(e).width > 0);
    parts.slice(1).forEach((part, n) => {
      if (box(part).left < box(parts[n]).left) say(`${part.textContent} stands before ${parts[n].textContent}`);
    });
  }
}
return found;

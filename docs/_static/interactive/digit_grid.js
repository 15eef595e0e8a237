/* The 8 x 8 numbers: a grid that is read and edited by keyboard.
 *
 * Arrow keys move; 0 to 9 write a number (1 then 6 makes 16), + and - change it by one, the space
 * bar switches between 0 and 16.
 */
"use strict";

globalThis.digitGrid = (() => {
  const SIDE = 8;
  const MOST = 16;
  const TOGETHER = 1000; // milliseconds within which two keys make one number
  const { element, paint } = figures;
  const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

  /* What a key makes of a number; undefined for a key that is not ours. */
  function edited(key, value, justTyped) {
    if (key === " ") return value ? 0 : MOST;
    if (key === "+" || key === "-") return Math.min(MOST, Math.max(0, value + Number(`${key}1`)));
    if (!/^[0-9]$/.test(key)) return undefined;
    const longer = 10 * value + Number(key);
    return justTyped && longer <= MOST ? longer : Number(key);
  }

  /* `valueAt(index)` gives the present number; `changed(index, value)` is called when the reader has
   * written one. What the cells show may be older by a frame. */
  function make(table, valueAt, changed) {
    const cells = [];
    let typed = { index: -1, time: 0 };

    function focus(index) {
      cells.forEach((cell, i) => { cell.tabIndex = i === index ? 0 : -1; });
      cells[index].focus();
    }

    function press(event, index) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const move = MOVES[event.key];
      const [y, x] = [Math.floor(index / SIDE), index % SIDE];
      if (move) {
        const [row, column] = [y + move[0], x + move[1]];
        const inside = row >= 0 && row < SIDE && column >= 0 && column < SIDE;
        if (inside) focus(SIDE * row + column);
      } else {
        const soon = typed.index === index && event.timeStamp - typed.time < TOGETHER;
        const value = edited(event.key, valueAt(index), soon);
        if (value === undefined) return;
        typed = { index, time: event.timeStamp };
        changed(index, value);
      }
      event.preventDefault();
    }

    for (let y = 0; y < SIDE; y++) {
      const row = element("tr", { role: "row" });
      for (let x = 0; x < SIDE; x++) {
        const index = SIDE * y + x;
        const cell = element("td", { role: "gridcell", tabindex: index ? -1 : 0 });
        cell.addEventListener("keydown", (event) => press(event, index));
        cell.addEventListener("click", () => focus(index));
        cells.push(cell);
        row.append(cell);
      }
      table.append(row);
    }
    return (counts) => cells.forEach((cell, i) => {
      if (cell.textContent === String(counts[i])) return;
      const [y, x] = [Math.floor(i / SIDE) + 1, (i % SIDE) + 1];
      cell.textContent = counts[i];
      cell.setAttribute("aria-label", `${counts[i]}, row ${y}, column ${x}`);
      paint(cell, counts[i] / MOST, { dark: 0.535 });
    });
  }

  return { edited, make };
})();

/* The drawing surface: lines of a mouse, a finger or a pen, in pixels of the 32 x 32 bitmap. */
"use strict";

globalThis.digitPad = (() => {
  const PEN = 5; // the width of a line, in pixels of the bitmap
  const NEAR = 0.4; // points closer than this to the last one are left out

  /* `changed(drawn)` is called with all strokes whenever a point is added. */
  function make(canvas, changed) {
    const pad = { drawn: [], behind: null };
    let stroke = null;

    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      const place = (value, start, size) =>
        strokes.SIDE * Math.min(1, Math.max(0, (value - start) / size));
      return { x: place(event.clientX, box.left, box.width),
        y: place(event.clientY, box.top, box.height) };
    };

    function extend(event) {
      const events = event.getCoalescedEvents?.() ?? [];
      for (const point of (events.length ? events : [event]).map(at)) {
        const last = stroke[stroke.length - 1];
        if (Math.hypot(point.x - last.x, point.y - last.y) >= NEAR) stroke.push(point);
      }
      pad.paint();
      changed({ begins: false });
    }

    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || stroke) return;
      event.preventDefault();
      canvas.setPointerCapture(event.pointerId);
      changed({ begins: true });
      stroke = [at(event)];
      pad.behind = null;
      pad.drawn = [...pad.drawn, stroke];
      pad.paint();
      changed({ begins: false });
    });
    canvas.addEventListener("pointermove", (event) => stroke && extend(event));
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, () => { stroke = null; });
    }

    pad.paint = () => {
      const ink = canvas.getContext("2d");
      const unit = canvas.width / strokes.SIDE;
      ink.clearRect(0, 0, canvas.width, canvas.height);
      ink.fillStyle = ink.strokeStyle = getComputedStyle(canvas).color;
      if (pad.behind) paintBlocks(ink, pad.behind, canvas.width / 8);
      ink.lineWidth = PEN * unit;
      ink.lineCap = ink.lineJoin = "round";
      for (const line of pad.drawn) {
        ink.beginPath();
        ink.moveTo(unit * line[0].x, unit * line[0].y);
        for (const point of line) ink.lineTo(unit * point.x, unit * point.y);
        ink.stroke();
      }
    };
    return pad;
  }

  /* An image that was not drawn here: 8 x 8 counts. */
  function paintBlocks(ink, counts, size) {
    counts.forEach((value, i) => {
      ink.globalAlpha = value / 16;
      ink.fillRect(size * (i % 8), size * Math.floor(i / 8), size + 0.5, size + 0.5);
    });
    ink.globalAlpha = 1;
  }

  return { make };
})();

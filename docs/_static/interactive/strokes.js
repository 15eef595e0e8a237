/* From the lines of a pen to 8 x 8 numbers, as the images of the dataset were made: a bitmap of
 * 32 x 32 black or white pixels, whose black pixels are counted in blocks of 4 x 4 (E. Alpaydin and
 * C. Kaynak, UCI 1998).
 *
 * A stroke is an array of points {x, y} in pixels of the bitmap: (0, 0) is its upper left corner,
 * (32, 32) its lower right one.
 */
"use strict";

globalThis.strokes = (() => {
  const SIDE = 32; // pixels of the bitmap
  const BLOCK = 4; // pixels of a block
  const PEN = 2.5; // half the width of a line that is taken as drawn
  const BLACK = 312; // black pixels of a digit, the mean of the training images
  const WIDEST = 22; // pixels across of a centred digit; its height is 32
  const ROUNDS = 4;
  const MOST_SLANT = 0.3; // that one round takes away
  const LARGEST = 6; // times that a small drawing is enlarged

  /* The square of the distance of a point from the line between a and b. */
  function square(x, y, a, b) {
    const [dx, dy] = [b.x - a.x, b.y - a.y];
    const length = dx * dx + dy * dy;
    const along = length ? ((x - a.x) * dx + (y - a.y) * dy) / length : 0;
    const t = Math.min(1, Math.max(0, along));
    return (x - a.x - t * dx) ** 2 + (y - a.y - t * dy) ** 2;
  }

  /* The distance of the centre of every pixel from the nearest line. */
  function distances(drawn) {
    const found = new Float64Array(SIDE * SIDE).fill(Infinity);
    for (const stroke of drawn) {
      stroke.forEach((b, i) => {
        const a = stroke[Math.max(0, i - 1)];
        for (let pixel = 0; pixel < found.length; pixel++) {
          const [x, y] = [(pixel % SIDE) + 0.5, Math.floor(pixel / SIDE) + 0.5];
          found[pixel] = Math.min(found[pixel], square(x, y, a, b));
        }
      });
    }
    return found.map(Math.sqrt);
  }

  /* Half the pen's width with which `BLACK` pixels become black, within what a pen can be. */
  function penFor(from) {
    const sorted = Float64Array.from(from).sort();
    return Math.min(5, Math.max(1.2, sorted[BLACK]));
  }

  /* The drawing moved to the middle and scaled to the height of the bitmap, lines and all. */
  function fitted(drawn, pen) {
    const points = drawn.flat();
    const range = (values) => [Math.min(...values), Math.max(...values)];
    const [left, right] = range(points.map((point) => point.x));
    const [top, bottom] = range(points.map((point) => point.y));
    const scale = (room, size) => Math.min(LARGEST, Math.max(0, room - 2 * pen) / (size || 1e-9));
    const down = scale(SIDE, bottom - top);
    const across = Math.min(down, scale(WIDEST, right - left)); // never wider than it was drawn
    const place = ({ x, y }) => ({
      x: SIDE / 2 + across * (x - (left + right) / 2),
      y: SIDE / 2 + down * (y - (top + bottom) / 2),
    });
    return drawn.map((stroke) => stroke.map(place));
  }

  const limited = (by) => Math.min(MOST_SLANT, Math.max(-MOST_SLANT, by));

  /* How far the first black pixel of the last row is right of that of the first row, in pixels
   * across for each pixel down. */
  function slant(from, pen) {
    const black = [...from.keys()].filter((pixel) => from[pixel] <= pen);
    const ends = [black[0], black.find((pixel) => pixel >= SIDE * row(black[black.length - 1]))];
    const [first, last] = ends.map((pixel) => pixel % SIDE);
    return (last - first) / Math.max(1, row(ends[1]) - row(ends[0]));
  }

  const row = (pixel) => Math.floor(pixel / SIDE);
  const upright = (drawn, by) =>
    drawn.map((stroke) => stroke.map(({ x, y }) => ({ x: x - by * y, y })));

  /* 32 x 32 zeros and ones. Centred: as large as a digit of the dataset, as upright, and with as
   * much black. A wider pen needs more room and an upright digit less, so this is repeated. */
  function bitmap(drawn, { centred = true } = {}) {
    if (!drawn.flat().length) return new Uint8Array(SIDE * SIDE);
    if (!centred) return Uint8Array.from(distances(drawn), (away) => Number(away <= PEN));
    let [pen, placed] = [PEN, fitted(drawn, PEN)];
    let from = distances(placed);
    for (let round = 0; round < ROUNDS; round++) {
      pen = penFor(from);
      placed = fitted(upright(placed, limited(slant(from, pen))), pen);
      from = distances(placed);
    }
    return Uint8Array.from(from, (away) => Number(away <= pen));
  }

  /* Black pixels of each block of 4 x 4: 64 numbers from 0 to 16. */
  function count(bits) {
    const across = SIDE / BLOCK;
    const counts = new Array(across * across).fill(0);
    bits.forEach((bit, pixel) => {
      const y = Math.floor(pixel / SIDE / BLOCK);
      const x = Math.floor((pixel % SIDE) / BLOCK);
      counts[y * across + x] += bit;
    });
    return counts;
  }

  /* Counts 0 to 16 as grey values 0 to 255, rounded, as vitkit stores the dataset. */
  const grey = (counts) => counts.map((value) => Math.floor((value * 255 + 8) / 16));

  /* (pixel / 255 - mean) / std, by the mean and standard deviation of the checkpoint. */
  const normalise = (pixels, { mean, std }) => pixels.map((pixel) => (pixel / 255 - mean) / std);

  return { SIDE, bitmap, count, fitted, grey, normalise };
})();

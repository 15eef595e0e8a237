/* A Vision Transformer in plain JavaScript: what vitkit.ViT computes for the digits, and no more.
 *
 * Letters as in the tutorial: T tokens, D width, h heads, d = D / h, L blocks. A matrix is an array
 * of rows, and a row is a Float64Array. `weights` maps a name of the checkpoint to {shape, values}.
 * Chapters: 1 patches, 2 attention, 3 the block, 4 the whole model.
 */
"use strict";

globalThis.vit = (() => {
  /* A row of numbers, each from its place. */
  function row(length, value) {
    const made = new Float64Array(length);
    for (let i = 0; i < length; i++) made[i] = value(i);
    return made;
  }

  /* y = x W^T + b for every row x: W has one row for each output, as in torch.nn.Linear. */
  function linear(x, weights, name) {
    const W = weights[`${name}.weight`].values;
    const b = weights[`${name}.bias`].values;
    return x.map((token) => row(b.length, (out) => {
      let sum = b[out];
      for (let i = 0, w = out * token.length; i < token.length; i++, w++) sum += W[w] * token[i];
      return sum;
    }));
  }

  /* LN(x) = (x - mean) / sqrt(variance + eps) * gain + shift, for every token by itself. */
  function layerNorm(x, weights, name, eps) {
    const gain = weights[`${name}.weight`].values;
    const shift = weights[`${name}.bias`].values;
    return x.map((token) => {
      const D = token.length;
      const mean = token.reduce((sum, value) => sum + value, 0) / D;
      const variance = token.reduce((sum, value) => sum + (value - mean) ** 2, 0) / D;
      const scale = 1 / Math.sqrt(variance + eps);
      return row(D, (i) => (token[i] - mean) * scale * gain[i] + shift[i]);
    });
  }

  /* erf(x) = 2 / sqrt(pi) * exp(-x^2) * sum over n of 2^n x^(2n+1) / (1 * 3 * 5 ... (2n+1)).
   * All terms have one sign, so nothing cancels; beyond 5 the rest is below 2e-12. */
  function erf(x) {
    if (Math.abs(x) > 5) return Math.sign(x);
    let term = x;
    let sum = x;
    for (let n = 1; Math.abs(term) > 1e-16 * Math.abs(sum); n++) {
      term *= (2 * x * x) / (2 * n + 1);
      sum += term;
    }
    return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
  }

  /* GELU(x) = x * Phi(x), where Phi is the distribution function of the normal distribution. */
  const gelu = (x) => (x * (1 + erf(x / Math.SQRT2))) / 2;

  /* softmax(s)_j = exp(s_j / t) / sum over k of exp(s_k / t). The largest score is taken off first:
   * it changes nothing but the size of the numbers. t is the temperature, 1 in the model. */
  function softmax(scores, temperature = 1) {
    const largest = Math.max(...scores);
    const powers = row(scores.length, (j) => Math.exp((scores[j] - largest) / temperature));
    const sum = powers.reduce((total, power) => total + power, 0);
    return powers.map((power) => power / sum);
  }

  /* Cut an image (H x W numbers in a row) into patches of P x P, row by row: N rows of P P numbers. */
  function patchify(image, { height, width, patch }) {
    const patches = [];
    for (let top = 0; top < height; top += patch) {
      for (let left = 0; left < width; left += patch) {
        patches.push(row(patch * patch, (i) => {
          const y = top + Math.floor(i / patch);
          return image[y * width + left + (i % patch)];
        }));
      }
    }
    return patches;
  }

  /* Eq. 1: z_0 = [x_class; x_1 E; ...; x_N E] + E_pos. */
  function embed(patches, weights, { positions }) {
    const z = [Float64Array.from(weights.cls_token.values)];
    z.push(...linear(patches, weights, "patch_embed.proj"));
    if (!positions) return z;
    const table = weights.pos_embed.values;
    return z.map((token, t) => row(token.length, (i) => token[i] + table[t * token.length + i]));
  }

  /* A = softmax(q k^T / sqrt(d)), and A v, of one head. */
  function attention(q, k, v) {
    const d = q[0].length;
    const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
    const weights = q.map((query) => softmax(k.map((key) => dot(query, key) / Math.sqrt(d))));
    const outputs = weights.map((A) => row(v[0].length, (i) =>
      v.reduce((sum, value, j) => sum + A[j] * value[i], 0)));
    return { weights, outputs };
  }

  /* MSA(z) = [SA_1(z); ...; SA_h(z)] U_msa with [q, k, v] = z U_qkv, each split into h heads. */
  function selfAttention(z, weights, name, heads) {
    const D = z[0].length;
    const d = D / heads;
    const qkv = linear(z, weights, `${name}.qkv`);
    const part = (which, head) =>
      qkv.map((token) => token.subarray(which * D + head * d, which * D + (head + 1) * d));
    const found = Array.from({ length: heads }, (_, head) =>
      attention(part(0, head), part(1, head), part(2, head)));
    const joined = z.map((_, t) => row(D, (i) => found[Math.floor(i / d)].outputs[t][i % d]));
    return { maps: found.map((one) => one.weights), z: linear(joined, weights, `${name}.proj`) };
  }

  /* MLP(x) = GELU(x W_1 + b_1) W_2 + b_2. */
  function mlp(x, weights, name) {
    const hidden = linear(x, weights, `${name}.fc1`).map((token) => token.map(gelu));
    return linear(hidden, weights, `${name}.fc2`);
  }

  const add = (a, b) => a.map((token, t) => row(token.length, (i) => token[i] + b[t][i]));

  /* Eq. 2: z' = MSA(LN(z)) + z.   Eq. 3: z = MLP(LN(z')) + z'. */
  function block(z, weights, name, { heads, eps }) {
    const msa = selfAttention(layerNorm(z, weights, `${name}.norm1`, eps), weights,
      `${name}.attn`, heads);
    const between = add(msa.z, z);
    const normed = layerNorm(between, weights, `${name}.norm2`, eps);
    return { maps: msa.maps, z: add(mlp(normed, weights, `${name}.mlp`), between) };
  }

  /* Eq. 4: y = LN(z_L^0), the class token after the last block; logits = y W^T + b. */
  function readOut(z, weights, eps) {
    return linear(layerNorm([z[0]], weights, "norm", eps), weights, "head")[0];
  }

  /* The whole model. `image` is normalised: (pixel / 255 - mean) / std.
   * Gives the logits, attention[layer][head] as T rows of T weights, and the logits that the head
   * would give if the model ended after each block. */
  function forward(model, image, { positions = true } = {}) {
    const { weights, depth, heads, eps } = model;
    const patches = patchify(image, model);
    let z = embed(patches, weights, { positions });
    const maps = [];
    const afterBlock = [];
    for (let layer = 0; layer < depth; layer++) {
      const done = block(z, weights, `blocks.${layer}`, { heads, eps });
      z = done.z;
      maps.push(done.maps);
      afterBlock.push(readOut(z, weights, eps));
    }
    return { patches, attention: maps, afterBlock, logits: afterBlock[depth - 1] };
  }

  /* Weights come as base64 of float32 numbers, one after another, the lowest byte first. */
  function decode({ data, tensors, ...settings }) {
    const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const weights = {};
    for (const { name, shape, offset } of tensors) {
      const length = shape.reduce((product, size) => product * size, 1);
      weights[name] = { shape, values: row(length, (i) => view.getFloat32(4 * (offset + i), true)) };
    }
    return { ...settings, weights };
  }

  return { attention, decode, erf, forward, gelu, layerNorm, patchify, softmax };
})();

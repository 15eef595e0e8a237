"""The six drawings, and the animation."""

from __future__ import annotations

from .shapes import (
    Drawing,
    arrow,
    arrow_head,
    box,
    grid,
    label,
    line,
    link,
    note,
    patch,
    pixel,
    plus,
    token,
    tokens,
)


def vit() -> Drawing:
    """The whole model, from the image to the logits."""
    image = (
        grid(30, 16, 8, 8, 11, pixel) + '<rect x="30" y="16" width="88" height="88" class="edge"/>'
    )
    cut = "".join(patch(n, 212 + 50 * (n % 2), 10 + 50 * (n // 2), 11) for n in range(4))
    row = "".join(patch(n, 122 + 62 * n, 150, 8) for n in range(4))
    first = ["class", *["patch"] * 4]
    names = ["0", "1", "2", "3", "4"]
    spots = [66 + 62 * n for n in range(5)]
    embedded = "".join(token(x, 262, k, s) for x, k, s in zip(spots, first, names, strict=True))
    out = "".join(token(x, 512, k) for x, k in zip(spots, first, strict=True))
    bars = "".join(
        f'<rect x="{250 + 13 * n}" y="{622 - size}" width="9" height="{size}" class="{kind}"/>'
        for n, (size, kind) in enumerate(
            zip((5, 9, 4, 7, 3, 5, 8, 36, 6, 10), ["bar"] * 7 + ["best"] + ["bar"] * 2, strict=True)
        )
    )
    body = (
        link("01_patches#cutting", image + arrow((128, 60), (202, 60)) + note(165, 50, "cut") + cut)
        + note(74, 122, "image: 3 x 224 x 224") + note(262, 130, "196 patches of 16 x 16 x 3")
        + row + arrow((200, 192), (200, 206))
        + link("01_patches#one-matrix-for-all-patches-", box(60, 208, 300, 28, "each patch times the matrix E", "op"))
        + arrow((200, 238), (200, 256)) + embedded
        + note(45, 288, "class", "token", anchor="end")
        + note(200, 336, "+ position 0, 1, 2, ...: 197 x 768 (Eq. 1)")
        + arrow((200, 344), (200, 360))
        + link("03_encoder", box(40, 362, 320, 116, "", "frame")
               + box(56, 376, 288, 36, "attention: tokens read each other (Eq. 2)", "op")
               + box(56, 422, 288, 36, "MLP: each token by itself (Eq. 3)", "op")
               + arrow((200, 412), (200, 421)) + note(200, 472, "12 blocks, the shape stays 197 x 768"))
        + arrow((200, 480), (200, 506)) + out
        + arrow((74, 558), (74, 584))
        + link("04_vit", box(26, 586, 96, 36, "LN, head", "op") + note(74, 638, "Eq. 4: only token 0"))
        + arrow((124, 604), (240, 604)) + note(182, 596, "1000 logits") + bars
        + note(315, 638, "highest: the answer")
    )  # fmt: skip
    return Drawing(
        "A Vision Transformer",
        "An image is cut into 196 patches. Each patch is multiplied by the matrix E and becomes a "
        "token of 768 numbers. A class token is put in front and positions are added: 197 tokens "
        "(Eq. 1). Twelve blocks of attention (Eq. 2) and MLP (Eq. 3) change the tokens, not their "
        "number. LayerNorm and a linear head turn token 0 into 1000 logits (Eq. 4).",
        650,
        body,
    )


def block() -> Drawing:
    """A block with its residual stream, pre-norm and post-norm."""

    def branch(top: float, name: str, target: str, equation: str) -> str:
        return link(target, (
            line((70, top), (140, top)) + arrow((140, top), (162, top))
            + box(164, top - 16, 56, 32, "LN", "norm") + arrow((220, top), (242, top))
            + box(244, top - 16, 66, 32, name, "op")
            + arrow((277, top + 16), (277, top + 62), (81, top + 62)) + plus(70, top + 62)
            + note(322, top + 5, equation, anchor="start")
        ))  # fmt: skip

    body = (
        label(24, 20, "z: 197 x 768", anchor="start") + line((70, 30), (70, 300), kind="stream")
        + branch(66, "MSA", "02_attention#self-attention-and-heads", "Eq. 2")
        + branch(176, "MLP", "03_encoder#the-mlp-and-gelu", "Eq. 3")
        + arrow((70, 290), (70, 312), kind="stream")
        + label(24, 332, "z: 197 x 768, to the next block", anchor="start")
        + note(96, 152, "the residual stream goes straight on", anchor="start")
        + note(96, 262, "each branch only adds to it", anchor="start")
        + line((20, 352), (380, 352), kind="thin")
        + label(200, 374, "Where the norm stands")
        + small_stack(30, "pre-norm (ViT)", True) + small_stack(220, "post-norm (2017)", False)
    )  # fmt: skip
    return Drawing(
        "The block and its residual stream",
        "The tokens z run straight through the block. A first branch reads them through LayerNorm "
        "and attention, and its output is added (Eq. 2). A second branch reads them through "
        "LayerNorm and the MLP, and its output is added (Eq. 3). Below: pre-norm normalises within "
        "the branch, post-norm normalises the sum, so that the stream itself passes each norm.",
        530,
        body,
    )


def small_stack(x: float, title: str, before: bool) -> str:
    """Return a branch with its norm before the layer, or after the sum."""
    made = note(x + 75, 396, title) + line((x + 30, 404), (x + 30, 500), kind="stream")
    if before:
        made += (
            arrow((x + 30, 416), (x + 75, 416)) + box(x + 76, 404, 60, 24, "LN", "norm")
            + arrow((x + 106, 428), (x + 106, 440)) + box(x + 76, 441, 60, 24, "layer", "op")
            + arrow((x + 106, 465), (x + 106, 482), (x + 40, 482)) + plus(x + 30, 482)
        )  # fmt: skip
    else:
        made += (
            arrow((x + 30, 416), (x + 75, 416)) + box(x + 76, 404, 60, 24, "layer", "op")
            + arrow((x + 106, 428), (x + 106, 450), (x + 40, 450)) + plus(x + 30, 450)
            + box(x + 5, 468, 50, 24, "LN", "norm")
        )  # fmt: skip
    return (
        made
        + arrow_head((x + 30, 490), (x + 30, 512), 9)
        + line((x + 30, 492), (x + 30, 505), kind="stream")
    )


def heads() -> Drawing:
    """Multi-head self-attention with the shapes of ViT-B/16."""
    columns = {"q": 40, "k": 160, "v": 280}
    made = (
        label(200, 20, "z: 197 x 768") + arrow((200, 28), (200, 44))
        + link("02_attention#self-attention-and-heads",
               box(40, 46, 320, 30, "one matrix: queries, keys and values", "op"))
    )  # fmt: skip
    for name, x in columns.items():
        made += arrow((x + 40, 78), (x + 40, 96)) + label(x + 40, 112, name, "math")
        for number in (2, 1, 0):
            made += box(x + 8 * number, 138 - 8 * number, 76, 40, "", f"head{number}")
        made += label(x + 38, 163, "197 x 64")
    made += (
        note(138, 203, "12 heads each")
        + arrow((78, 180), (78, 216)) + arrow((198, 180), (198, 216))
        + link("02_attention#why-the-root-of-d", box(40, 218, 200, 34, "q k^{T} / √d", "op"))
        + arrow((140, 252), (140, 266)) + box(40, 268, 200, 30, "softmax of each row", "op")
        + arrow((140, 298), (140, 314))
    )  # fmt: skip
    for number, kind in ((2, "head2"), (1, "head1"), (0, "plain")):
        place = f'x="{90 + 7 * number}" y="{330 - 7 * number}" width="84" height="84"'
        made += f'<rect {place} class="{kind}"/>'
    shades = ("w1", "w0", "w0", "w1", "w2", "w0", "w0", "w1", "w3")
    made += grid(90, 330, 7, 7, 12, lambda row, column: shades[(3 * row + 5 * column) % 9])
    made += (
        note(132, 430, "weights: 12 x 197 x 197", "each row sums to 1")
        + line((318, 180), (318, 372)) + arrow((318, 372), (298, 372), (252, 372))
        + note(324, 300, "v", anchor="start")
        + arrow((188, 372), (230, 372)) + '<circle cx="241" cy="372" r="10" class="plain"/>'
        + label(241, 377, "×") + arrow((241, 382), (241, 460))
        + note(252, 420, "means of", "the values", anchor="start")
        + box(120, 462, 242, 30, "heads side by side: 197 x 768", "plain")
        + arrow((241, 492), (241, 508))
        + link("02_attention#self-attention-and-heads", box(120, 510, 242, 30, "projection mixes the heads", "op"))
        + arrow((241, 540), (241, 556)) + label(241, 572, "MSA(z): 197 x 768")
    )  # fmt: skip
    return Drawing(
        "Multi-head self-attention",
        "One matrix makes queries, keys and values of the 197 tokens. They are split into 12 heads "
        "of 64 numbers. In each head, the scores of all queries with all keys, divided by the root "
        "of 64, become weights by a softmax: 12 maps of 197 x 197. Their products with the values "
        "are joined to 197 x 768 numbers again, and a projection mixes the heads.",
        584,
        made,
    )


def patches() -> Drawing:
    """Eq. 1 at the size of a digit."""
    image = (
        grid(20, 20, 8, 8, 13, pixel)
        + '<rect x="20" y="20" width="104" height="104" class="edge"/>'
    )
    cut = "".join(patch(n, 190 + 62 * (n % 2), 14 + 62 * (n // 2), 13) for n in range(4))
    row = grid(20, 176, 1, 16, 15, lambda _, column: pixel(column // 4, 4 + column % 4))
    body = (
        link("01_patches#cutting", image + arrow((134, 72), (180, 72)) + cut, "Cutting")
        + note(72, 142, "8 x 8 pixels") + note(247, 148, "4 patches of 4 x 4")
        + line((310, 40), (350, 40), (350, 183)) + arrow((350, 183), (350, 184), (270, 184))
        + row + '<rect x="20" y="176" width="240" height="15" class="edge"/>'
        + note(140, 208, "patch 2 as a row: 16 numbers")
        + arrow((140, 214), (140, 236))
        + link("01_patches#one-matrix-for-all-patches-",
               box(60, 238, 160, 40, "times E: 16 x 48", "op"))
        + note(232, 256, "the same matrix", "for every patch", anchor="start")
        + arrow((140, 278), (140, 302)) + note(154, 296, "48 numbers", anchor="start")
        + tokens(52, 306, ["class", "patch", "patch", "patch", "patch"], step=66)
        + note(60, 366, "class") + note(126, 366, "patch 1") + note(192, 366, "patch 2")
        + note(258, 366, "patch 3") + note(324, 366, "patch 4")
        + "".join(label(60 + 66 * n, 390, "+") for n in range(5))
        + link("01_patches#position-embeddings",
               tokens(52, 402, ["position"] * 5, step=66)
               + "".join(note(60 + 66 * n, 462, f"position {n}") for n in range(5)))
        + arrow((192, 470), (192, 490))
        + link("01_patches#all-of-eq-1", box(60, 492, 264, 30, "z_{0}: 5 tokens of 48 numbers (Eq. 1)", "plain"))
    )  # fmt: skip
    return Drawing(
        "From patches to tokens",
        "A digit of 8 x 8 pixels is cut into 4 patches. Each patch is written as a row of 16 "
        "numbers and multiplied by the same matrix E, which gives 48 numbers: a token. The class "
        "token is put in front, and each token gets its position added: z_0 of Eq. 1.",
        534,
        body,
    )


def encoder_decoder() -> Drawing:
    """The Transformer of 2017 with its masks."""

    def stack(x: float, top: float, parts: list[tuple[str, str, str]]) -> str:
        made, y = "", top
        for text, kind, target in parts:
            made += link(target, box(x, y, 150, 34, text, kind)) + arrow(
                (x + 75, y + 34), (x + 75, y + 50)
            )
            y += 50
        return made

    source = [("self-attention", "op", "10_transformer"), ("MLP", "op", "10_transformer")]
    target = [
        ("masked attention", "op", "10_transformer#masks"),
        ("cross-attention", "cross", "10_transformer"),
        ("MLP", "op", "10_transformer"),
    ]
    body = (
        label(95, 20, "source") + note(95, 36, "h g a k")
        + label(305, 20, "target, shifted") + note(305, 36, "start k a g")
        + arrow((95, 42), (95, 62)) + arrow((305, 42), (305, 62))
        + box(12, 56, 166, 152, "", "frame") + box(222, 56, 166, 202, "", "frame")
        + stack(20, 66, source) + stack(230, 66, target)
        + note(95, 200, "6 encoder blocks") + note(305, 250, "6 decoder blocks")
        + arrow((95, 208), (95, 217)) + label(95, 231, "memory") + arrow((130, 226), (200, 226), (200, 133), (229, 133))
        + arrow((305, 258), (305, 276))
        + link("10_transformer#greedy-decoding", box(230, 278, 150, 30, "linear: next token", "op"))
        + arrow((305, 308), (305, 324)) + label(305, 340, "k a g h end")
        + line((20, 362), (380, 362), kind="thin")
        + label(200, 384, "Masks: row = query, filled = may be read")
        + grid(34, 402, 5, 5, 17, lambda row, column: "yes" if column <= row else "no", 1)
        + note(79, 510, "causal: no", "later token")
        + grid(156, 402, 5, 5, 17, lambda row, column: "yes" if column < 3 else "no", 1)
        + note(201, 510, "padding: two", "columns hidden")
        + grid(278, 402, 5, 5, 17,
               lambda row, column: "yes" if column <= row and (column < 3 or column == row) else "no", 1)
        + note(323, 510, "both (a padded", "one reads itself)")
    )  # fmt: skip
    return Drawing(
        "The encoder-decoder of 2017 and its masks",
        "The source goes through six encoder blocks of self-attention and MLP and becomes the "
        "memory. The target, shifted by one, goes through six decoder blocks: masked "
        "self-attention, cross-attention whose keys and values come from the memory, and an MLP. A "
        "linear layer predicts the next token. Three masks: causal, padding, and both.",
        534,
        body,
    )


def distillation() -> Drawing:
    """DeiT: a token that learns from a teacher."""
    first = ["class", "patch", "patch", "patch", "patch", "teacher"]
    spots = [40 + 46 * n for n in range(6)]
    tokens_in = "".join(token(x, 60, kind) for x, kind in zip(spots, first, strict=True))
    tokens_out = "".join(token(x, 194, kind) for x, kind in zip(spots, first, strict=True))
    body = (
        grid(316, 18, 8, 8, 8, pixel) + '<rect x="316" y="18" width="64" height="64" class="edge"/>'
        + note(348, 98, "image")
        + tokens_in + note(48, 48, "class") + note(163, 48, "patches") + note(278, 48, "distillation")
        + arrow((310, 24), (163, 24), (163, 35)) + arrow((163, 108), (163, 128))
        + link("03_encoder", box(30, 130, 268, 36, "blocks: all tokens read each other", "op"))
        + arrow((163, 168), (163, 188)) + tokens_out
        + arrow((48, 240), (48, 266)) + arrow((278, 240), (278, 266))
        + link("09_distillation", box(14, 268, 96, 32, "class head", "op")
               + box(206, 268, 128, 32, "distillation head", "op"))
        + arrow((348, 104), (348, 350)) + link("09_distillation#a-teacher",
               box(306, 352, 84, 46, "teacher\n(a CNN)", "cross"))
        + arrow((62, 300), (62, 352)) + arrow((250, 300), (250, 352))
        + box(14, 354, 96, 42, "cross-\nentropy", "norm") + box(196, 354, 92, 42, "loss to the\nteacher", "norm")
        + arrow((306, 375), (290, 375)) + note(62, 414, "with the label")
        + note(242, 414, "with its answer")
        + line((20, 432), (380, 432), kind="thin")
        + label(200, 454, "Prediction: without a teacher")
        + box(20, 470, 104, 30, "class logits", "plain")
        + box(134, 470, 134, 30, "distillation logits", "plain")
        + arrow((72, 500), (72, 516), (340, 516), (340, 501)) + line((201, 500), (201, 516))
        + box(304, 470, 76, 30, "mean", "op")
    )  # fmt: skip
    return Drawing(
        "DeiT's distillation token",
        "A second learned token joins the class token and the patches. It passes all blocks and has "
        "its own head. The class head learns from the label, the distillation head from the answer "
        "of a teacher, a CNN that sees the same image. For a prediction the logits of both heads "
        "are averaged, and no teacher is needed.",
        526,
        body,
    )


DRAWINGS = {
    "vit": vit,
    "block": block,
    "heads": heads,
    "patches": patches,
    "encoder-decoder": encoder_decoder,
    "distillation": distillation,
}

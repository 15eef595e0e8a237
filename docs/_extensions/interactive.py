"""Parts of a page that answer the reader: a digit to draw, and examples whose numbers change.

Each is a directive whose body is one sentence. Its HTML stands without JavaScript, with the numbers
that vitkit gives; the scripts of `_static/interactive` make it answer. Only a page that has such a
part loads its scripts. The weights of the digits' model become a script too, because a page that is
opened as a file may not read other files.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from docutils import nodes
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.osutil import relative_uri

import vitkit
from vitkit.data.images.preprocess import normalise
from vitkit.models.embedding import patchify

DOCS = Path(__file__).parents[1]
CHECKPOINT = DOCS / "tutorial/checkpoints/digits.safetensors"
WEIGHTS = "digit_weights.js"
EXAMPLES = 10
"""Test images beside the drawing, one of each digit."""
STILL = 7
"""The one that stands without JavaScript."""


def weights_script(path: Path = CHECKPOINT) -> str:
    """Return a script that sets `digitModel`: the model, how its input is made, and examples."""
    checkpoint = vitkit.load(path)
    spec, preprocess = checkpoint.model.spec, checkpoint.preprocess
    check_supported(spec)
    tensors, parts, offset = [], [], 0
    for name, value in checkpoint.model.state_dict().items():
        tensors.append({"name": name, "shape": list(value.shape), "offset": offset})
        parts.append(value.numpy().astype("<f4").tobytes())
        offset += value.numel()
    model = {
        "height": spec.image_size[0],
        "width": spec.image_size[1],
        "patch": spec.patch_size[0],
        "depth": spec.depth,
        "heads": spec.num_heads,
        "eps": spec.norm_eps,
        "mean": preprocess.mean[0],
        "std": preprocess.std[0],
        "classes": list(checkpoint.classes),
        "examples": examples(),
        "tensors": tensors,
        "data": base64.b64encode(b"".join(parts)).decode("ascii"),
    }
    return f"globalThis.digitModel = {json.dumps(model, separators=(',', ':'))};\n"


def check_supported(spec: vitkit.ViTSpec) -> None:
    """Stop the build for a model that vit.js does not compute."""
    plain = vitkit.ViTSpec(
        image_size=spec.image_size, patch_size=spec.patch_size, in_channels=1,
        num_classes=spec.num_classes, width=spec.width, depth=spec.depth,
        num_heads=spec.num_heads, mlp_width=spec.mlp_width, stem=spec.stem,
        norm_eps=spec.norm_eps,
    )  # fmt: skip
    square = spec.patch_size[0] == spec.patch_size[1]
    if not square or spec.stem not in ("convolution", "linear") or spec != plain:
        raise ValueError(f"{CHECKPOINT.name}: vit.js does not compute {spec}")


def examples() -> list[dict[str, Any]]:
    """Return the first test image of each digit, as counts 0 to 16."""
    test = vitkit.open_dataset("digits").splits["test"]
    labels = [int(label) for label in test.labels]
    found = []
    for digit in range(EXAMPLES):
        index = labels.index(digit)
        counts = np.rint(test.read(index)[..., 0] / 255 * 16).astype(int)
        found.append({"label": digit, "index": index, "counts": counts.ravel().tolist()})
    return found


def decimals(value: float, places: int) -> str:
    """Format a number as the scripts do: a true minus sign, and no negative zero."""
    text = f"{value:.{places}f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "parts"), undefined=StrictUndefined,
    autoescape=True, trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
TEMPLATES.filters["decimals"] = decimals


def attention_numbers() -> dict[str, Any]:
    """Return the example of chapter 2, as vitkit computes it."""
    q = torch.tensor([[1.0, 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
    k, v = torch.eye(4, 3), 4.5 * torch.arange(12.0).reshape(4, 3)
    outputs, weights = vitkit.scaled_dot_product_attention(q, k, v, return_weights=True)
    scores = q @ k.T / math.sqrt(q.shape[-1])
    named = {"q": q, "k": k, "v": v, "scores": scores, "weights": weights, "outputs": outputs}
    return {name: matrix.tolist() for name, matrix in named.items()}


SCORES = [
    [1.5, 0.5, 0.0, -0.5, 1.0, 0.0],
    [0.5, 2.0, 0.5, 0.0, -1.0, 1.0],
    [0.0, 1.0, 1.0, 0.5, 0.0, -0.5],
    [-0.5, 0.0, 1.5, 1.0, 0.5, 1.0],
    [1.0, -1.0, 0.5, 2.0, 1.0, 0.0],
    [0.0, 0.5, -0.5, 1.0, 1.5, 0.5],
]
"""Of the mask's example: made up, small, with a different largest score in each row."""


def mask_numbers() -> dict[str, Any]:
    """Return the example of chapter 10 with the causal mask, as vitkit computes it."""
    scores = torch.tensor(SCORES)
    mask = torch.ones(len(SCORES), len(SCORES)).tril().bool()
    # queries that give these scores with the unit vectors as keys
    queries = scores * math.sqrt(len(SCORES))
    keys = torch.eye(len(SCORES))
    _, weights = vitkit.scaled_dot_product_attention(
        queries, keys, keys, mask=mask, return_weights=True
    )
    return {"scores": SCORES, "mask": mask.tolist(), "weights": weights.tolist()}


@cache
def digit_numbers() -> dict[str, Any]:
    """Return what stands without JavaScript, and the numbers of the texts beside the drawing."""
    checkpoint = vitkit.load(CHECKPOINT)
    spec = checkpoint.model.spec
    shown = examples()
    counts = torch.tensor([example["counts"] for example in shown]).view(-1, 8, 8, 1)
    images = normalise(((counts * 255 + 8) // 16).to(torch.uint8), checkpoint.preprocess)
    record = vitkit.Record(attention=list(range(spec.depth)))
    with torch.inference_mode():
        logits = checkpoint.model(images, record=record)
    probabilities = logits[STILL].softmax(-1).tolist()
    still = {
        "image": counts[STILL, ..., 0].tolist(),
        "patches": patchify(counts[STILL].float().movedim(-1, 0)[None], spec.patch_size)[0]
        .unflatten(-1, spec.patch_size)
        .tolist(),
        "maps": [record.attention[layer][STILL].tolist() for layer in range(spec.depth)],
        "bars": list(zip(checkpoint.classes, probabilities, strict=True)),
        "top": max(probabilities),
        "label": shown[STILL]["label"],
        "index": shown[STILL]["index"],
    }
    wrong = int((logits.argmax(-1) != torch.tensor([x["label"] for x in shown])).sum())
    return {
        "still": still,
        "misread": ["none", "one", "two", "three"][wrong],
        "depth": spec.depth,
        "heads": spec.num_heads,
        "right": per_cent_right(checkpoint),
        "without_positions": per_cent_right(without_positions(checkpoint)),
    }


def without_positions(checkpoint: vitkit.Checkpoint) -> vitkit.Checkpoint:
    """Return the checkpoint with position embeddings of zero; its model is changed."""
    checkpoint.model.pos_embed.data.zero_()
    return checkpoint


def per_cent_right(checkpoint: vitkit.Checkpoint) -> str:
    """Return the share of the test images that a model reads right."""
    test = vitkit.open_dataset("digits").splits["test"]
    pixels = torch.from_numpy(np.stack([test.read(index) for index in range(len(test))]))
    with torch.inference_mode():
        answers = checkpoint.model(normalise(pixels, checkpoint.preprocess)).argmax(-1)
    return f"{100 * np.mean(answers.numpy() == np.asarray(test.labels)):.2f}"


@dataclass(frozen=True)
class Part:
    """An interactive part: its numbers, and the scripts that make it answer.

    Attributes:
        numbers: returns what its template shows.
        scripts: files of `_static/interactive`, in the order in which they run.
    """

    numbers: Callable[[], dict[str, Any]]
    scripts: tuple[str, ...]

    def html(self, name: str, sentence: str, link: Callable[[str, str], str]) -> str:
        """Return the part as HTML.

        Args:
            name: of the directive.
            sentence: its body.
            link: from a page and an anchor to an address.
        """
        template = TEMPLATES.get_template(f"{name.replace('-', '_')}.html")
        return template.render(self.numbers(), sentence=sentence, link=link)


PARTS = {
    "digit-page": Part(
        digit_numbers,
        ("vit.js", "strokes.js", "figures.js", "digit_pad.js", "digit_grid.js", "digit_views.js",
         WEIGHTS, "digit_page.js"),
    ),
    "attention-example": Part(attention_numbers, ("vit.js", "figures.js", "attention_example.js")),
    "mask-example": Part(mask_numbers, ("vit.js", "figures.js", "mask_example.js")),
}  # fmt: skip


class PartDirective(SphinxDirective):
    """One of `PARTS`; its body is a sentence."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the part as raw HTML that knows its name."""
        page = self.env.docname

        def link(target: str, anchor: str) -> str:
            return f"{relative_uri(page, target)}.html{anchor}"

        html = PARTS[self.name].html(self.name, " ".join(self.content), link)
        made = nodes.raw("", html, format="html")
        made["part"] = self.name
        return [made]


def load_scripts(
    app: Sphinx, page: str, template: str, context: dict[str, Any], document: nodes.document | None
) -> None:
    """Load what the parts of a page need, on that page alone."""
    if document is None:
        return
    found = [node["part"] for node in document.findall(nodes.raw) if node.get("part")]
    for name in dict.fromkeys(script for part in found for script in PARTS[part].scripts):
        app.add_js_file(f"interactive/{name}", loading_method="defer")
    if found:
        app.add_css_file("interactive/interactive.css")


def write_weights(app: Sphinx) -> None:
    """Write the weights as a script beside the others."""
    if app.builder.format == "html":
        place = Path(app.outdir) / "_static/interactive" / WEIGHTS
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(weights_script(), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, object]:
    """Add the directives."""
    for name in PARTS:
        app.add_directive(name, PartDirective)
    app.connect("builder-inited", write_weights)
    app.connect("html-page-context", load_scripts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

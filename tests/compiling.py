"""Run by `test_compile.py` in a process of its own: what torch.compile and torch.export make of us.

Its arguments are the names of cases.

jaxtyping's checks, which run in all other tests, would break the graphs. Each line of the output is
the JSON of one case: its name, and how far it is from the eager model, or the error.
"""

import json
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable

# torch's inductor still imports a part of torch.jit, and people still trace.
warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)

import torch  # noqa: E402
from peers import noisy_vit, random_images, relative  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

import vitkit  # noqa: E402

# A trace fixes the image's sides, and says so.
warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)

SPEC = vitkit.ViTSpec(image_size=32, patch_size=8, width=32, depth=1, num_heads=2, mlp_width=64,
                      num_classes=5)  # fmt: skip
GATED = {"num_registers": 2, "layer_scale": 1e-5, "mlp": "swiglu_packed", "activation": "silu"}
STEMS = {
    "linear": {"stem": "linear"},
    "normed_linear": {"stem": "normed_linear"},
    "resnet": {"stem": "resnet", "resnet_layers": (1, 1)},
}
"""Exported only: compiled, they would prove what the others prove."""
VARIATIONS = {
    "plain": {},
    "registers": GATED,
    "rope": {"positions": "rope", "class_token": False, "pooling": "mean"},
    "sincos_2d": {"positions": "sincos_2d"},
    "distilled": {"distillation_token": True},
    "map": {"pooling": "map", "class_token": False},
}
Case = Callable[[], float]


def compiled(name: str, backend: str) -> float:
    """The whole forward pass as one graph: a break is an error."""
    model, images = noisy_vit(SPEC.replace(**VARIATIONS[name])).eval(), random_images(2, 32)
    whole = torch.compile(model, fullgraph=True, backend=backend)
    with torch.inference_mode():
        return relative(whole(images), model(images))


def trained(backend: str) -> float:
    """The gradients of a compiled step."""
    model, images = noisy_vit(SPEC), random_images(2, 32)
    gradients = []
    for forward in (torch.compile(model, fullgraph=True, backend=backend), model):
        model.zero_grad()
        forward(images).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return relative(*gradients)


class Watched(vitkit.Record):
    """A record that says whether it was filled by a compiled graph."""

    in_a_graph: bool | None = None

    def keep(self, layer: int, tokens: torch.Tensor) -> None:
        self.in_a_graph = torch.compiler.is_compiling()
        super().keep(layer, tokens)


def recorded(backend: str) -> float:
    """Maps and tokens that a compiled model leaves in a record; only the layer asked for runs
    outside the graphs."""
    model, images = noisy_vit(SPEC.replace(depth=2)).eval(), random_images(2, 32)
    whole = torch.compile(model, backend=backend)
    eager, compiled = (Watched(attention=[1], tokens=[1]) for _ in range(2))
    counters["stats"].clear()
    with torch.inference_mode():
        differences = [relative(whole(images, compiled), model(images, eager))]
    assert counters["stats"]["unique_graphs"] > 0
    assert not compiled.in_a_graph
    for what in ("attention", "tokens"):
        ours, theirs = getattr(compiled, what), getattr(eager, what)
        assert sorted(ours) == sorted(theirs) == [1]
        differences.append(relative(ours[1], theirs[1]))
    return max(differences)


def backbone(backend: str) -> float:
    """Maps of inner layers, compiled as one graph and exported with a dynamic batch."""
    model = vitkit.FeatureMaps(noisy_vit(SPEC.replace(depth=3)).eval(), [0, 1])
    batch, images = {0: torch.export.Dim("batch")}, random_images(5, 32)
    whole = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        program = torch.export.export(model, (images[:2],), dynamic_shapes=(batch,)).module()
        expected = torch.cat(model(images))
        return max(relative(torch.cat(made(images)), expected) for made in (whole, program))


def exported(name: str) -> float:
    """Export with a dynamic batch, and a trace, run with other batches than they were made with."""
    model = noisy_vit(SPEC.replace(**(VARIATIONS | STEMS)[name])).eval()
    batch, images = {0: torch.export.Dim("batch")}, random_images(2, 32)
    with torch.no_grad():
        program = torch.export.export(model, (images,), dynamic_shapes=(batch,)).module()
        trace = torch.jit.trace(model, images, check_trace=False)
        return max(
            relative(made(random_images(n, 32)), model(random_images(n, 32)))
            for made in (program, trace)
            for n in (1, 2, 5)
        )


def exported_transformer() -> float:
    """The encoder-decoder with a dynamic batch."""
    model = vitkit.Transformer(width=32, num_heads=2, encoder_depth=1, decoder_depth=1,
                               mlp_width=64).eval()  # fmt: skip
    pair = torch.randn(5, 7, 32), torch.randn(5, 6, 32)
    few = tuple(part[:2] for part in pair)
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(model, few, dynamic_shapes=(batch, batch)).module()
    with torch.no_grad():
        return relative(program(*pair), model(*pair))


QUICK = {"plain", "registers", "rope", "map"}
"""Variations of the fast tests, in which `features` compiles the plain one."""
CASES: dict[str, Case] = {
    "train plain aot_eager": lambda: trained("aot_eager"),
    "features plain aot_eager": lambda: backbone("aot_eager"),
    "record plain aot_eager": lambda: recorded("aot_eager"),
}
if any(map(shutil.which, ("c++", "g++", "clang++"))):  # inductor writes C++ for CPUs
    CASES["compile plain inductor"] = lambda: compiled("plain", "inductor")
for _name in VARIATIONS:
    CASES[f"compile {_name} aot_eager"] = lambda name=_name: compiled(name, "aot_eager")
for _name in VARIATIONS | STEMS:
    CASES[f"export {_name}"] = lambda name=_name: exported(name)
CASES["export Transformer"] = exported_transformer


def main() -> None:
    for name in sys.argv[1:]:
        torch.compiler.reset()
        try:
            result: dict[str, object] = {"difference": CASES[name]()}
        except Exception:  # noqa: BLE001 - one case that fails must not hide the others
            result = {"error": traceback.format_exc(limit=-3)}
        print(json.dumps({"case": name} | result), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

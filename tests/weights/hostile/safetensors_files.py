"""safetensors files whose container lies, and whole ones that do not fit a model."""

import functools
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from weights.hostile.watch import Case
from weights.round_trips import noisy, stored, written

import vitkit

SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 1,
         "mlp_width": 96, "num_classes": 7}  # fmt: skip
FILE = "weights.safetensors"


def raw(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(shape: object, start: object, end: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@functools.cache
def published() -> dict[str, Tensor]:
    """The tensors of a small model by torchvision's names."""
    model = noisy(vitkit.ViTSpec(**SMALL))
    with tempfile.TemporaryDirectory() as place:
        return stored(written("torchvision", model, Path(place) / "files"))


def whole() -> bytes:
    """A whole file, of which broken ones are cut."""
    return save(published())


CONTAINER = "not a (complete )?safetensors file"


def containers() -> dict[str, Case]:
    """Files that contradict themselves."""
    one, good = {"a": entry([1], 0, 4)}, whole()
    length = struct.unpack("<Q", good[:8])[0]
    made = {
        "seven bytes": b"1234567",
        "header of no length": raw(b"", size=0),
        "header longer than the file": raw({}, size=10**6),
        "header huge": raw({}, size=2**40),
        "header of 2^63 bytes": raw({}, size=2**63),
        "header of 2^64-1 bytes": raw({}, size=2**64 - 1),
        "no JSON": raw(b"{not json"),
        "header a list": raw([1, 2]),
        "header a number": raw(7),
        "header not UTF-8": raw(b'{"\xff\xfe": {}}'),
        "deep JSON": raw(b'{"a":' * 100_000),
        "deep metadata": raw(b'{"__metadata__":' + b"[" * 100_000),
        "deep lists": raw(b"[" * 100_000),
        "metadata of numbers": raw({"__metadata__": {"a": 1}, **one}, bytes(4)),
        "metadata a list": raw({"__metadata__": ["a"], **one}, bytes(4)),
        "cut in the length": good[:5],
        "cut in the header": good[: 8 + length // 2],
        "cut after the header": good[: 8 + length],
        "cut in the data": good[:-1],
        "trailing bytes": good + bytes(64),
        "overlap": raw({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        "same bytes twice": raw({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, bytes(8)),
        "hole": raw({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
        "reversed offsets": raw({"a": entry([1], 4, 0)}, bytes(4)),
        "offsets beyond the file": raw({"a": entry([1000], 0, 4000)}, bytes(4)),
        "offsets of 2^64-1": raw({"a": entry([1], 2**64 - 4, 2**64 - 1)}, bytes(4)),
        "negative offsets": raw({"a": entry([1], -4, 0)}, bytes(4)),
        "three offsets": raw({"a": {**entry([1], 0, 4), "data_offsets": [0, 2, 4]}}, bytes(4)),
        "dtype unknown": raw({"a": entry([1], 0, 4, "F33")}, bytes(4)),
        "shape overflows": raw({"a": entry([2**62, 2**62], 0, 16)}, bytes(16)),
        "shape overflows to fit": raw({"a": entry([2**32, 2**32, 1], 0, 0)}),
        "shape larger than its bytes": raw({"a": entry([100], 0, 16)}, bytes(16)),
        "shape of negatives": raw({"a": entry([-1, -1], 0, 4)}, bytes(4)),
        "shape of floats": raw({"a": entry([1.0], 0, 4)}, bytes(4)),
        "shape of strings": raw({"a": entry(["1"], 0, 4)}, bytes(4)),
        "shape a number": raw({"a": entry(1, 0, 4)}, bytes(4)),
        "sub-byte numbers that do not fill a byte": raw({"a": entry([3], 0, 1, "F4")}, bytes(1)),
    }  # fmt: skip
    broken = {name: Case({FILE: content}, CONTAINER) for name, content in made.items()}
    start = b"PK\x03\x04" + bytes(60)
    return broken | {
        "a zip": Case({FILE: start}, CONTAINER),
        "zero bytes": Case({FILE: b""}, r"the file is empty \(0 bytes\)"),
        "LFS pointer": Case({FILE: b"version https://git-lfs.github.com/spec/v1\n"}, "Git LFS"),
        "web page": Case({FILE: b"<!DOCTYPE html><html>"}, "a web page"),
    }


def oddities() -> dict[str, Case]:
    """Whole containers with odd content: none is of a known format."""
    many = {f"t{i}": entry([0], 0, 0) for i in range(50_001)}
    pair = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    twice = pair + b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    unknown = "no known format"
    return {
        "50 001 tensors": Case({FILE: raw(many)}, "50001 tensors are too many"),
        "no tensors": Case({FILE: raw({})}, unknown),
        "a key twice": Case({FILE: raw(twice, bytes(4))}, "twice|no known format"),
        "empty name": Case({FILE: raw({"": entry([1], 0, 4)}, bytes(4))}, unknown),
        "name with NUL": Case({FILE: raw({"a\0b": entry([1], 0, 4)}, bytes(4))}, unknown),
        "name of lines": Case({FILE: raw({"a\n\x1b[2Jb": entry([1], 0, 4)}, bytes(4))}, unknown),
        "name of 1 MB": Case({FILE: raw({"a" * 10**6: entry([1], 0, 4)}, bytes(4))}, unknown),
        "name ../x": Case({FILE: raw({"../x": entry([1], 0, 4)}, bytes(4))}, unknown),
        "scalar": Case({FILE: raw({"a": entry([], 0, 4)}, bytes(4))}, unknown),
        "sub-byte numbers": Case({FILE: raw({"a": entry([4], 0, 2, "F4")}, bytes(2))}, unknown),
        "1000 axes": Case({FILE: raw({"a": entry([1] * 1000, 0, 4)}, bytes(4))}, unknown),
        "empty and endless": Case(
            {FILE: raw({"a": entry([10**12, 0], 0, 0)})}, "an empty tensor has a side of 10"
        ),
        "metadata of 30 MB": Case(
            {FILE: raw({"__metadata__": {"vitkit": "[" * 30_000_000}})},
            "its header has 30000032 bytes",
        ),
        "metadata that is not read": Case(
            {FILE: save(published(), {"author": "somebody\n", "vitkot": "{"})},
            accepted="entries of the header that vitkit does not know mean nothing to it",
        ),
    }


HEAD, BIAS = "heads.head.weight", "encoder.layers.encoder_layer_1.mlp.0.bias"
STEM = "conv_proj.weight"


def changed(**changes: Any) -> bytes:
    """The whole file with some tensors replaced, or left out (`None`)."""
    state = {**published(), **{key.replace("__", "."): value for key, value in changes.items()}}
    return save({name: tensor for name, tensor in state.items() if tensor is not None})


def mismatches() -> dict[str, Case]:
    """Whole files whose tensors are not those of a model."""
    state = published()

    def swap(name: str, tensor: Tensor | None) -> dict[str, bytes]:
        return {FILE: changed(**{name: tensor})}

    head = state[HEAD]
    nan, infinite = head.clone(), head.clone()
    nan[3, 5], infinite[0, 0] = float("nan"), float("-inf")
    kinds = {"int64": torch.int64, "uint8": torch.uint8, "bool": torch.bool,
             "complex64": torch.complex64, "float8_e4m3fn": torch.float8_e4m3fn}  # fmt: skip
    wrong = {f"{name} numbers": Case(swap(HEAD, head.to(kind)), f"{HEAD}.*{name}")
             for name, kind in kinds.items()}  # fmt: skip
    wrong |= {
        "missing": Case(swap(BIAS, None), f"{BIAS} is missing"),
        "extra": Case(swap("more", torch.zeros(3)), "1 unknown tensor: more"),
        "wrong shape": Case(swap(BIAS, torch.zeros(5)), r"the shape \(5,\)"),
        "transposed": Case(swap("encoder.layers.encoder_layer_0.mlp.0.weight", torch.zeros(64, 96)),
                           r"the model needs"),
        "stem transposed": Case(swap(STEM, state[STEM].permute(1, 2, 3, 0).contiguous())),
        "scalar stem": Case(swap(STEM, torch.tensor(1.0)), "not a valid file"),
        "flat stem": Case(swap(STEM, torch.zeros(64)), "not a valid file"),
        "empty stem": Case(swap(STEM, torch.zeros(0, 3, 8, 8)), "as torchvision"),
        "patch of no pixels": Case(swap(STEM, torch.zeros(64, 3, 0, 0)), "as torchvision"),
        "no positions": Case(swap("encoder.pos_embedding", None), "not a valid file"),
        "no grid": Case(swap("encoder.pos_embedding", torch.zeros(1, 8, 64)), "not a square grid"),
        "NaN": Case(swap(HEAD, nan), f"{HEAD}: 1 of 448 numbers.*NaN or infinite"),
        "infinite": Case(swap(HEAD, infinite), f"{HEAD}: 1 of 448 numbers.*NaN or infinite"),
        "too large for float32": Case(swap(HEAD, head.double() * 1e300), f"{HEAD}: .*infinite"),
        "a block left out": Case(
            {FILE: save({n.replace("layer_1", "layer_7"): t for n, t in state.items()})},
            "block 1 is missing"),
        "block 10^999": Case(
            {FILE: save({n.replace("layer_1", "layer_" + "9" * 999): t for n, t in state.items()})},
            "as torchvision"),
    }  # fmt: skip
    return {name: case._replace(unseen=True) for name, case in wrong.items()} | {
        "float64": Case({FILE: save({n: t.double() for n, t in state.items()})},
                        accepted="wider numbers are rounded to float32"),
        "float16": Case({FILE: save({n: t.half() for n, t in state.items()})},
                        accepted="half precision is widened, and inspect says so"),
    }  # fmt: skip


@functools.cache
def weights() -> dict[str, Tensor]:
    return dict(noisy(vitkit.ViTSpec(**SMALL)).state_dict())


def own(**changes: Any) -> bytes:
    """A file of vitkit's with another description; `None` leaves an entry out."""
    document = {
        "format_version": 1,
        "spec": vitkit.ViTSpec(**SMALL).to_json(),
        "preprocess": vitkit.Preprocess(image_size=32).to_json(),
        "classes": [f"class {i}" for i in range(7)],
    } | changes
    text = json.dumps({name: value for name, value in document.items() if value is not None})
    return save(weights(), {"vitkit": text})


def with_text(text: str) -> bytes:
    """A file of vitkit's whose description is this."""
    return save(weights(), {"vitkit": text})


def descriptions() -> dict[str, Case]:
    """Our own files with a description that lies."""
    spec = vitkit.ViTSpec(**SMALL).to_json()
    pixels = vitkit.Preprocess(image_size=32).to_json()
    large = {"depth": 10**9, "width": 10**12, "num_heads": 10**12, "mlp_width": 10**12,
             "num_classes": 10**12, "num_registers": 10**12, "image_size": 10**9,
             "head_width": 10**12, "representation_width": 10**12,
             "patch_size": 2**62}  # fmt: skip
    made = {f"{name} {value:.0e}": own(spec={**spec, name: value}) for name, value in large.items()}
    shaped = {"depth": 4000, "width": 1_000_000, "mlp_width": 1_000_000, "num_classes": 10**7,
              "image_size": 16_384, "num_registers": 60_000}  # fmt: skip
    made |= {f"{name} {value}, in range": own(spec={**spec, name: value})
             for name, value in shaped.items()}  # fmt: skip
    stages = {"stem": "resnet", "patch_size": 16, "resnet_layers": [10**9, 1]}
    made |= {
        "stages of 10^9": own(spec={**spec, **stages}),
        "stages of 900": own(spec={**spec, **stages, "resnet_layers": [900, 900]}),
        "a pair of heads": own(spec={**spec, "num_heads": [1, 1]}),
        "spec a list": own(spec=[1]),
        "spec a string": own(spec="ViT-B/16"),
        "no spec": own(spec=None),
        "unknown field": own(spec={**spec, "exec": "1"}),
        "preprocess a list": own(preprocess=[]),
        "mean NaN": with_text(json.dumps({"format_version": 1, "spec": spec, "classes": [],
                                          "preprocess": {**pixels, "mean": [float("nan")] * 3}})),
        "100,000 unknown fields": own(spec={**spec, **dict.fromkeys(map(str, range(100_000)), 1)}),
        "a field of 400,000 texts": own(spec={**spec, "resnet_layers": ["x"] * 400_000}),
        "1,500,000 entries": raw(b"{%s}" % b",".join(b'"%d":{}' % n for n in range(1_500_000))),
        "mean too long": own(preprocess={**pixels, "mean": [0.5] * 1000}),
        "std 0": own(preprocess={**pixels, "std": [0.5, 0, 0.5]}),
        "images of 10^9": own(preprocess={**pixels, "image_size": 10**9}),
        "another number of channels": own(preprocess={**pixels, "mean": [0.5], "std": [0.5]}),
        "classes numbers": own(classes=[1, 2, 3, 4, 5, 6, 7]),
        "classes a string": own(classes="abcdefg"),
        "classes a number": own(classes=7),
        "classes null": with_text(json.dumps({"format_version": 1, "spec": spec,
                                              "preprocess": pixels, "classes": None})),
        "too few classes": own(classes=["a"]),
        "version huge": own(format_version=10**30),
        "version negative": own(format_version=-1),
        "version a string": own(format_version="1"),
        "version true": own(format_version=True),
        "no version": own(format_version=None),
        "description a list": with_text("[]"),
        "description deep": with_text("[" * 100_000),
        "description no JSON": with_text("{'spec': 1}"),
        "a key of the description twice": with_text('{"spec": {}, "spec": {}}'),
        "a number of 5000 digits": with_text('{"format_version": ' + "9" * 5000 + "}"),
    }  # fmt: skip
    cases = {f"own: {name}": Case({FILE: content}, "") for name, content in made.items()}
    nan = noisy(vitkit.ViTSpec(**SMALL)).state_dict()
    nan["head.weight"][0, 0] = float("nan")
    text = json.dumps({"format_version": 1, "spec": spec, "preprocess": pixels})
    return cases | {
        "own: NaN": Case(
            {FILE: save(dict(nan), {"vitkit": text})}, "head.weight: 1 of 448", unseen=True
        ),
        "own: as it should be": Case({FILE: own()}, accepted="the control: nothing is wrong"),
        "own: whole numbers": Case(
            {FILE: save({n: t.long() for n, t in nan.items()}, {"vitkit": text})},
            "int64",
            unseen=True,
        ),
    }

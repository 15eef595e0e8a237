"""Folders whose JSON lies: `config.json`, `preprocessor_config.json`, and the index of shards."""

import json
import tempfile
from pathlib import Path
from typing import Any

from weights.hostile.safetensors_files import SMALL, published, whole
from weights.hostile.watch import Case
from weights.round_trips import noisy, written

import vitkit

WEIGHTS, CONFIG, PIXELS = "model.safetensors", "config.json", "preprocessor_config.json"
INDEX = "model.safetensors.index.json"


def folder(form: str, **fields: Any) -> dict[str, bytes]:
    """A small model as the format's folder."""
    model = noisy(vitkit.ViTSpec(**{**SMALL, **fields}))
    with tempfile.TemporaryDirectory() as place:
        written(form, model, Path(place), tuple("abcdefg"))
        files = sorted(Path(place).iterdir(), key=lambda file: file.name != WEIGHTS)
        return {file.name: file.read_bytes() for file in files}


def edited(files: dict[str, bytes], name: str, **changes: Any) -> dict[str, bytes]:
    """The folder with entries of one document changed."""
    return {**files, name: json.dumps({**json.loads(files[name]), **changes}).encode()}


def texts() -> dict[str, Case]:
    """Documents that are no sane JSON, beside whole weights of a format that needs them."""
    files = folder("huggingface")
    made = {
        "deep": b'{"a":' * 100_000,
        "deep lists": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "5000 digits": b'{"image_size": ' + b"9" * 5000 + b"}",
        "NaN": b'{"image_size": NaN}',
        "infinity": b'{"image_size": -Infinity}',
        "a key twice": b'{"image_size": 32, "image_size": 64}',
        "a list": b"[]",
        "empty": b"",
        "not UTF-8": b'{"a": "\xff"}',
        "UTF-16": '{"a": 1}'.encode("utf-16"),
        "cut": b'{"image_size": 3',
        "9 MB": b'{"a": "' + b"a" * 9_000_000 + b'"}',
    }
    cases = {f"config.json: {name}": Case({**files, CONFIG: text}, "config.json: ")
             for name, text in made.items()}  # fmt: skip
    return cases | {
        "config.json: of another author": Case(
            {WEIGHTS: whole(), CONFIG: made["cut"]}, accepted="the weights describe themselves"),
    }  # fmt: skip


def huggingface() -> dict[str, Case]:
    """`config.json` and `preprocessor_config.json` that contradict the tensors, or themselves."""
    files = folder("huggingface")
    config: dict[str, tuple[dict[str, Any], str]] = {
        "heads 10^9": ({"num_attention_heads": 10**9}, ""),
        "heads 0": ({"num_attention_heads": 0}, ""),
        "heads a list": ({"num_attention_heads": [1]}, ""),
        "image_size 10^9": ({"image_size": 10**9}, ""),
        "image_size -32": ({"image_size": -32}, ""),
        "image_size an object": ({"image_size": {"height": 32}}, ""),
        "image_size of three": ({"image_size": [32, 32, 32]}, ""),
        "image_size a string": ({"image_size": "32"}, ""),
        "epsilon negative": ({"layer_norm_eps": -1}, ""),
        "activation a list": ({"hidden_act": []}, ""),
        "activation of our own": ({"hidden_act": "__import__('os')"}, "hidden_act"),
        "id2label a list": ({"id2label": ["a"]}, "id2label"),
        "architectures a number": ({"architectures": 7}, ""),
    }  # fmt: skip
    pixels: dict[str, tuple[dict[str, Any], str]] = {
        "mean of strings": ({"image_mean": ["a", "b", "c"]}, ""),
        "mean too long": ({"image_mean": [0.5] * 1000}, ""),
        "std 0": ({"image_std": [0, 0, 0]}, ""),
        "scale a long string": ({"rescale_factor": "9" * 4_000_000}, ""),
        "scale a long list": ({"rescale_factor": [0] * 1_000_000}, "values are too many"),
        "size a string": ({"size": "large"}, ""),
        "crop of an edge of 0": ({"size": {"shortest_edge": 0}, "do_center_crop": True}, ""),
        "crop of 10^300": ({"size": {"shortest_edge": 10**300}, "do_center_crop": True}, ""),
        "crop 0": ({"size": {"shortest_edge": 8}, "do_center_crop": True, "crop_size": 0}, ""),
        "crop negative": ({"size": {"shortest_edge": -8}, "do_center_crop": True}, ""),
        "filter a list": ({"resample": [3]}, ""),
    }
    cases = {f"huggingface: {name}": Case(edited(files, CONFIG, **change), message)
             for name, (change, message) in config.items()}  # fmt: skip
    cases |= {f"preprocessor: {name}": Case(edited(files, PIXELS, **change), message)
              for name, (change, message) in pixels.items()}  # fmt: skip
    return cases | {
        "huggingface: epsilon in quotes": Case(
            edited(files, CONFIG, layer_norm_eps="1e-6"), accepted="it is a number all the same"),
        "huggingface: 10^9 layers": Case(
            edited(files, CONFIG, num_hidden_layers=10**9, hidden_size=10**9),
            accepted="the tensors decide; a warning says what config.json has"),
        "huggingface: other class count": Case(
            edited(files, CONFIG, id2label={str(i): "x" for i in range(9)}),
            accepted="names that do not fit the head are left out, with a warning"),
    }  # fmt: skip


def timm() -> dict[str, Case]:
    """timm's `config.json`."""
    files = folder("timm")
    name = "vit_base_patch16_224"
    made: dict[str, tuple[dict[str, Any], str]] = {
        "another width": (
            {"architecture": name, "model_args": {"embed_dim": 10**9}},
            "a model of width",
        ),
        "heads 10^9": ({"architecture": "x", "model_args": {"num_heads": 10**9}}, ""),
        "arguments a list": ({"architecture": "x", "model_args": [1]}, ""),
        "arguments a string": ({"architecture": "x", "model_args": "depth"}, ""),
        "images a list": ({"architecture": "x", "pretrained_cfg": [1]}, ""),
        "img_size an object": ({"architecture": "x", "model_args": {"img_size": {}}}, ""),
        "pooling unknown": ({"architecture": "x", "global_pool": "exec"}, "global_pool"),
        "pooling a list": ({"architecture": "x", "global_pool": ["avg"]}, ""),
        "mean NaN": ({"architecture": "x", "pretrained_cfg": {"mean": ["nan"] * 3}}, ""),
        "mean too long": ({"architecture": "x", "pretrained_cfg": {"mean": [0.5] * 999}}, ""),
        "crop 1e300": ({"architecture": "x", "pretrained_cfg": {"crop_pct": 1e300}}, ""),
        "arguments a number": ({"architecture": "x", "model_args": 7}, ""),
        "labels a text": (
            {"architecture": "x", "label_names": "ab"},
            "label_names is str; expected",
        ),
    }
    cases = {f"timm: {what}": Case(edited(files, CONFIG, **change), message)
             for what, (change, message) in made.items()}  # fmt: skip
    return cases | {
        "timm: other class count": Case(
            edited(files, CONFIG, architecture="x", model_args={"num_heads": 1}, label_names=["a"]),
            accepted="names that do not fit the head are left out, with a warning"),
    }  # fmt: skip


def indices() -> dict[str, Case]:
    """Indices of shards that lead elsewhere."""
    names = sorted(published())
    good = {"a.safetensors": whole()}

    def index(places: object, **files: bytes) -> dict[str, bytes]:
        return {INDEX: json.dumps({"weight_map": places}).encode(), **good, **files}

    outside = "lies outside|is not a weights file"
    made: dict[str, tuple[dict[str, bytes], str]] = {
        "../": (index(dict.fromkeys(names, "../a.safetensors")), outside),
        "..": (index(dict.fromkeys(names, "..")), outside),
        "absolute": (index(dict.fromkeys(names, "/etc/passwd")), outside),
        "itself": (index(dict.fromkeys(names, INDEX)), outside),
        "nothing": (index(dict.fromkeys(names, "")), outside),
        "a number": (index(dict.fromkeys(names, 7)), outside),
        "a pickle": (index(dict.fromkeys(names, "a.bin"), **{"a.bin": b"\x80\x02N."}), "pickle"),
        "another index": (index(dict.fromkeys(names, "b.index.json"),
                                **{"b.index.json": b'{"weight_map": {"a": "' + INDEX.encode()
                                   + b'"}}'}), outside),
        "a shard that is missing": (index({**dict.fromkeys(names, "a.safetensors"),
                                           names[0]: "b.safetensors"}), "b.safetensors: no such"),
        "a shard that is empty": (index({**dict.fromkeys(names, "a.safetensors"),
                                         names[0]: "b.safetensors"}, **{"b.safetensors": b""}),
                                  "b.safetensors: the file is empty"),
        "10 000 shards": (index({n: f"{n}.safetensors" for n in map(str, range(10_000))}), ""),
        "a tensor elsewhere": (index({**dict.fromkeys(names, "a.safetensors"),
                                      "more": "a.safetensors"}), "more is not in"),
        "no map": (index([1]), "weight_map"),
        "an empty map": (index({}), "weight_map"),
        "lists for files": (index({"a": ["b"]}), outside),
    }  # fmt: skip
    return {f"index: {name}": Case(files, message) for name, (files, message) in made.items()}


def cases() -> dict[str, Case]:
    return {**texts(), **huggingface(), **timm(), **indices()}

"""Pickles that would run code, take all memory, or pretend to be weights.

Each one that holds code would make a canary: a folder whose path it is given.
"""

import argparse
import io
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from weights.hostile.safetensors_files import published
from weights.hostile.watch import Case

FILE = "weights.pth"


class Call:
    """Pickled, it is a call to be made by whoever reads it; `state` goes to what that gives."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.made = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.made


class Stored:
    """Pickled, it is a storage of so many numbers in another record of the file."""

    def __init__(self, count: Any, key: str = "0", kind: Any = torch.FloatStorage) -> None:
        self.identity = ("storage", kind, key, "cpu", count)


class Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> Any:
        return thing.identity if isinstance(thing, Stored) else None


def pickled(content: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file, protocol=2).dump(content)
    return file.getvalue()


def archive(pickle_bytes: bytes, records: Mapping[str, bytes] | None = None) -> bytes:
    """A file as `torch.save` writes it, around any pickle."""
    file = io.BytesIO()
    members = {
        "data.pkl": pickle_bytes,
        "byteorder": b"little",
        "version": b"3\n",
        **{f"data/{key}": data for key, data in (records or {"0": bytes(64)}).items()},
    }
    with zipfile.ZipFile(file, "w") as zipped:
        for name, content in members.items():
            zipped.writestr(f"archive/{name}", content)
    return file.getvalue()


def tensor(*size: int, stride: Any = None, offset: int = 0, storage: Any = None) -> Call:
    """A call that builds a tensor over a storage of 16 numbers, true or not."""
    stride = tuple([1] * len(size)) if stride is None else stride
    return Call(torch._utils._rebuild_tensor_v2, storage or Stored(16), offset, size, stride,
                False, OrderedDict())  # fmt: skip


def word(text: str) -> bytes:
    """A text as a pickle has it."""
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def codes(canary: Path) -> dict[str, bytes]:
    """Pickles that make the canary when a careless reader opens them."""
    place = str(canary)
    make = f"__import__('os').mkdir({place!r})"
    inner = pickled(Call(os.mkdir, place))
    hidden = argparse.Namespace(arch="deit", output=Call(os.mkdir, place))
    legacy = io.BytesIO()
    torch.save({"w": torch.zeros(2), "evil": Call(os.mkdir, place)}, legacy,
               _use_new_zipfile_serialization=False)  # fmt: skip
    zipped = io.BytesIO()
    torch.save({"state_dict": {"w": torch.zeros(2), "evil": Call(os.mkdir, place)}}, zipped)
    return {
        "os.system": pickled(Call(os.system, f"mkdir '{place}'")),
        "os.system in ASCII": f"cos\nsystem\n(S\"mkdir '{place}'\"\ntR.".encode(),
        "eval": pickled(Call(eval, make)),
        "exec": pickled({"model": Call(exec, f"import os; os.mkdir({place!r})")}),
        "in a checkpoint": zipped.getvalue(),
        "in an old checkpoint": legacy.getvalue(),
        "a key that is called": archive(pickled({Call(os.mkdir, place): 1})),
        "torch's bytes in a pickle": archive(
            pickled({"w": Call(torch.storage._load_from_bytes, inner)})
        ),
        "a type rebuilt by os.mkdir": archive(
            pickled({"w": Call(torch._tensor._rebuild_from_type_v2, os.mkdir, torch.Tensor,
                               (place,), {})})),
        "hooks": archive(pickled({"w": Call(
            torch._utils._rebuild_tensor_v2, Stored(16), 0, (2,), (1,), True,
            OrderedDict({0: Call(os.mkdir, place)}))})),
        "a Namespace's attribute": archive(pickled({"args": hidden, "model": {}})),
        "a state": archive(pickled({"w": Call(OrderedDict, state={"x": Call(os.mkdir, place)})})),
        "getattr of a module": archive(
            b"\x80\x02cbuiltins\ngetattr\n(cbuiltins\n__import__\n(" + word("os") + b"tR"
            + word("mkdir") + b"tR(" + word(place) + b"tR."
        ),
    }  # fmt: skip


def laughs() -> bytes:
    """Nine lists, each of ten times the last."""
    layers: list[Any] = ["ha" * 1000]
    for _ in range(9):
        layers = [layers] * 10
    return pickled({"model": layers})


def nested(depth: int, key: str) -> bytes:
    """`{key: {key: ...}}`, so deep; written by hand, as pickling it recurses."""
    return b"\x80\x02" + (b"}" + word(key)) * depth + b"}" + b"s" * depth + b"."


def cyclic() -> bytes:
    """A checkpoint whose entry `model` is the checkpoint."""
    content: dict[str, Any] = {"epoch": 1}
    content["model"] = content
    return pickled(content)


def legacy_tar() -> bytes:
    """The format of torch before 0.1.10, with a member that wants out."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in ("pickle", "storages", "tensors", "sys_info", "../outside"):
            entry = tarfile.TarInfo(name)
            entry.size = 4
            tar.addfile(entry, io.BytesIO(b"\x80\x02N."))
    return file.getvalue()


def torchscript() -> bytes:
    """A program, as `torch.jit.save` writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
    return file.getvalue()


def plain() -> bytes:
    """A whole checkpoint, as `torch.save` writes it."""
    file = io.BytesIO()
    torch.save({"model": published()}, file)
    return file.getvalue()


def containers() -> dict[str, bytes]:
    """Archives that are not what `torch.save` writes."""
    good, small = plain(), pickled({"w": tensor(4)})

    def more(name: str, content: bytes = b"x", mode: int = 0, **how: Any) -> bytes:
        file = io.BytesIO(good)
        with warnings.catch_warnings(), zipfile.ZipFile(file, "a") as zipped:
            warnings.simplefilter("ignore")
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            zipped.writestr(entry, content, **how)
        return file.getvalue()

    name = zipfile.ZipFile(io.BytesIO(good)).namelist()[0].split("/")[0]
    lied = bytearray(archive(small))
    at = lied.rindex(b"PK\x01\x02", 0, lied.rindex(b"archive/data/0"))
    lied[at + 20 : at + 28] = struct.pack("<II", 2**30, 2**30)
    script = archive(small, {"0": bytes(64)}).replace(b"archive/byteorder", b"archive/constants")
    return {
        "entry ../x": more("../x"),
        "entry /x": more("/tmp/x"),
        "symlink": more(f"{name}/data/link", b"/etc/passwd", 0o120777),
        "entry twice": more(f"{name}/data.pkl", pickled({"w": 1})),
        "bomb in the pickle": more(f"{name}/more.pkl", bytes(300_000_000), compress_type=8),
        "compressed": more(f"{name}/data/99", bytes(1000), compress_type=8),
        "bomb of overlapping entries": overlapping(),
        "record larger than the file": bytes(lied),
        "CRC of the pickle": spoilt(good, b"data.pkl"),
        "no pickle in it": archive(small).replace(b"data.pkl", b"data.pkI"),
        "TorchScript": torchscript(),
        "half a TorchScript": script.replace(b"constants", b"constants.pkl"[:9]),
        "legacy tar": legacy_tar(),
        "cut": good[: len(good) // 2],
        "cut at the end": good[:-30],
        "text": b"0.1 0.2 0.3\n" * 100,
        "a number": pickled(7),
        "safetensors inside": struct.pack("<Q", 2) + b"{}",
    }


def spoilt(content: bytes, record: bytes) -> bytes:
    """One byte of a record is changed, and its CRC is not."""
    at = content.index(record) + len(record) + 100
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


def overlapping() -> bytes:
    """A thousand entries of the directory that all lead to the same 100 kB."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        zipped.writestr("archive/data.pkl", pickled({}))
        zipped.writestr("archive/data/0", bytes(100_000))
        entry = zipped.infolist()[1]
        for key in range(1, 1000):
            copy = zipfile.ZipInfo(f"archive/data/{key}")
            copy.header_offset, copy.file_size = entry.header_offset, entry.file_size
            copy.compress_size, copy.CRC = entry.compress_size, entry.CRC
            zipped.filelist.append(copy)
            zipped.NameToInfo[copy.filename] = copy
        zipped._didModify = True
    return file.getvalue()


def tensors() -> dict[str, bytes]:
    """Tensors that lie about their numbers."""
    sparse, quantised, parted = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, torch says
        torch.save({"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, parted)
    torch.save({"w": torch.eye(4).to_sparse()}, sparse)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"w": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}, quantised)
    meta = Call(torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (10**6, 10**6),
                (10**6, 1), False)  # fmt: skip
    subclass = Call(torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2, Special,
                    (Stored(16), 0, (2,), (1,), False, OrderedDict()), {})  # fmt: skip
    lies = {
        "stride 0": tensor(10**6, 10**6, stride=(0, 0)),
        "overlapping rows": tensor(10, 10, stride=(0, 1)),
        "negative stride": tensor(4, stride=(-1,)),
        "offset beyond": tensor(4, offset=2**40),
        "negative offset": tensor(4, offset=-4),
        "size beyond": tensor(10**9),
        "negative size": tensor(-4),
        "size overflows": tensor(2**62, 2**62),
        "10^6 axes": tensor(*[1] * 10**6),
        "strides without end": tensor(4, stride=tuple([1] * 10**5)),
        "storage of 2^40": tensor(4, storage=Stored(2**40)),
        "storage of -1": tensor(4, storage=Stored(-1)),
        "storage of a string": tensor(4, storage=Stored("16")),
        "storage that is not there": tensor(4, storage=Stored(16, "7")),
        "storage ../../x": tensor(4, storage=Stored(16, "../../x")),
        "storage larger than its record": tensor(64, storage=Stored(64)),
        "storage and size beyond the file": tensor(10**7, storage=Stored(10**7)),
        "meta": meta,
        "subclass": subclass,
        "numpy scalar": np.float64(1.0),
        "numpy array": np.zeros(3),
    }
    made = {name: archive(pickled({"w": lie})) for name, lie in lies.items()}
    return made | {
        "sparse": sparse.getvalue(), "quantised": quantised.getvalue(), "nested": parted.getvalue(),
    }  # fmt: skip


class Special(torch.Tensor):
    """A user's own tensor class."""


def opcodes() -> dict[str, bytes]:
    """Streams that are no sane pickle."""
    start = b"\x80\x02"
    return {
        "string of 2 GB": start + b"X" + struct.pack("<I", 2**31 - 1) + b"abc.",
        "bytes of 2^60": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"abc.",
        "integer of 2^31 bytes": start + b"\x8b" + struct.pack("<i", 2**31 - 1) + b"abc.",
        "memo of 2^31": start + b"Nr" + struct.pack("<I", 2**31) + b".",
        "memo that is not there": start + b"h\x07.",
        "stack that is empty": start + b"0000R.",
        "mark that is not there": start + b"t.",
        "no end": start + b"N" * 1000,
        "an odd number of items": start + b"}(" + word("abc") + b"u.",
        "a list for a key": start + b"}]Ns.",
        "protocol 200": b"\x80\xc8N.",
        "set_ of a tensor": start + b"ctorch\nTensor\n)\x81(K\x01K\x02tb.",
        "dict in a dict, 10^5 deep": nested(100_000, "model"),
        "dict of others, 10^5 deep": nested(100_000, "a"),
        "lists, 10^5 deep": start + b"]" * 100_000 + b"a" * 99_999 + b".",
        "a checkpoint in itself": cyclic(),
        "billion laughs": laughs(),
    }


def cases(canaries: Path) -> dict[str, Case]:
    """All of them; the canary of a case is a folder of its name in `canaries`."""
    code = {name: codes(canaries / name)[name] for name in codes(canaries)}
    streams = {name: archive(stream) for name, stream in opcodes().items()}
    every = {**code, **containers(), **tensors(), **streams}
    lies = dict.fromkeys(("stride 0", "overlapping rows"), "stores another number of values")
    return {name: Case({FILE: content}, lies.get(name, "")) for name, content in every.items()}

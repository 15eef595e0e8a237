"""`.npz` files that lie, and whole ones that do not fit a model."""

import functools
import io
import struct
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from weights.hostile.watch import Case
from weights.round_trips import noisy, stored, written

import vitkit

FILE = "weights.npz"
SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 1,
         "mlp_width": 96, "num_classes": 7, "activation": "gelu_tanh"}  # fmt: skip
KERNEL = "embedding/kernel"
STACK = "Transformer/encoderblock/"


@functools.cache
def published() -> dict[str, np.ndarray]:
    """The arrays of a small model by vit_jax's names."""
    model = noisy(vitkit.ViTSpec(**SMALL))
    with tempfile.TemporaryDirectory() as place:
        tensors = stored(written("google", model, Path(place) / "files"))
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def header(text: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """A member of this header, whatever it says."""
    encoded = (text + "\n").encode("utf-8")
    length = struct.pack("<H" if version == (1, 0) else "<I", len(encoded))
    return b"\x93NUMPY" + bytes(version) + length + encoded + data


def says(shape: str, dtype: str = "'<f4'", data: bytes = bytes(64)) -> bytes:
    return header(f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}", data)


def npz(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def with_array(name: str, array: np.ndarray | None) -> bytes:
    """The whole file with one array replaced, or left out."""
    arrays = {**published(), name: array}
    return npz({f"{n}.npy": npy(a) for n, a in arrays.items() if a is not None})


def twice() -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")
        for value in (0.0, 1.0):
            archive.writestr("a.npy", npy(np.full(3, value)))
    return file.getvalue()


def flagged(content: bytes, at: int, value: int) -> bytes:
    """Two bytes of the first entry changed, in the directory and before the member."""
    made = bytearray(content)
    for start, offset in ((made.index(b"PK\x03\x04"), at), (made.index(b"PK\x01\x02"), at + 2)):
        made[start + offset : start + offset + 2] = struct.pack("<H", value)
    return bytes(made)


def declared(content: bytes, size: int) -> bytes:
    """The directory says that the first member is so long."""
    made = bytearray(content)
    at = made.index(b"PK\x01\x02")
    made[at + 24 : at + 28] = struct.pack("<I", size)
    return bytes(made)


def overlapping() -> bytes:
    """A thousand names for the same 100 kB, as in the bombs of overlapping members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a0.npy", npy(np.zeros(250_000, np.float32)))
        first = archive.infolist()[0]
        for number in range(1, 1000):
            copy = zipfile.ZipInfo(f"a{number}.npy")
            for part in ("header_offset", "file_size", "compress_size", "CRC", "compress_type"):
                setattr(copy, part, getattr(first, part))
            archive.filelist.append(copy)
            archive.NameToInfo[copy.filename] = copy
        archive._didModify = True
    return file.getvalue()


def broken() -> dict[str, Case]:
    """Files that are no arrays, or other arrays than they declare."""
    one = npz({"a.npy": npy(np.zeros(300))})
    deflated = npz({"a.npy": npy(np.random.default_rng(0).random(300))}, zipfile.ZIP_DEFLATED)
    at = deflated.index(b"a.npy") + 5 + 20
    spoilt = deflated[:at] + b"\xff" * 200 + deflated[at + 200 :]
    bomb = npz({"a.npy": says("(25000000,)", data=bytes(10**8))}, zipfile.ZIP_DEFLATED)
    assert len(bomb) * 1000 < 10**8
    deep = "(" * 4000 + ")" * 4000
    made: dict[str, tuple[bytes, str]] = {
        "no zip": (b"not a zip at all", "not a complete .npz file"),
        "a single .npy": (npy(np.zeros(3)), "not a complete .npz file"),
        "cut": (one[:-40], "not a complete .npz file"),
        "cut in an array": (one[:100] + one[-80:], ""),
        "no members": (npz({}), "no known format"),
        "objects": (npz({"a.npy": npy(np.array([{}], dtype=object))}), "no array of"),
        "fields": (npz({"a.npy": npy(np.zeros(3, [("x", "f4"), ("y", "i4")]))}), "no array of"),
        "fields of objects": (npz({"a.npy": npy(np.zeros(3, [("x", "O")]))}), "no array of"),
        "bomb, 1028 to 1": (bomb, "bytes declare 100000"),
        "bomb of overlapping members": (overlapping(), "they overlap"),
        "declared too short": (declared(one, 100), ""),
        "declared too long": (declared(one, 10**9), "bytes declare"),
        "shape larger than its bytes": (npz({"a.npy": says("(10**9,)")}), ""),
        "shape larger, in figures": (npz({"a.npy": says("(1000000000,)")}), "no array of"),
        "shape overflows": (npz({"a.npy": says(f"({2**32}, {2**32})")}), "declares"),
        "shape of 5000 digits": (npz({"a.npy": says(f"({'9' * 5000},)")}), ""),
        "shape negative": (npz({"a.npy": says("(-5,)")}), "no array of|not a complete"),
        "shape of negatives": (npz({"a.npy": says("(-2, -2)")}), "no array of|not a complete"),
        "shape of truths": (npz({"a.npy": says("(True,)")}), ""),
        "shape of floats": (npz({"a.npy": says("(1.5,)")}), "not a complete"),
        "shape of nothing, 10^18 long": (npz({"a.npy": says(f"({10**18},)", "'V0'")}), ""),
        "empty and endless": (npz({"a.npy": says(f"({10**18}, 0)")}), "an empty tensor has a side"),
        "dtype unknown": (npz({"a.npy": says("(1,)", "'<q9'")}), "not a complete"),
        "dtype a call": (npz({"a.npy": says("(1,)", "exit(1)")}), "not a complete"),
        "dtype of a module": (npz({"a.npy": says("(1,)", "'os.system'")}), "not a complete"),
        "header no dictionary": (npz({"a.npy": header("[1, 2]")}), "not a complete"),
        "header a call": (npz({"a.npy": header("exit(1)")}), "not a complete"),
        "header deep": (npz({"a.npy": header(deep)}), "not a complete"),
        "header of Python 2": (npz({"a.npy": says("(16L,)")}), ""),
        "header no Python": (npz({"a.npy": header("{'descr': '''")}), "not a complete"),
        "header of 4 GB": (npz({"a.npy": b"\x93NUMPY\2\0" + b"\xff" * 4}), "not a complete"),
        "header of 1 MB": (npz({"a.npy": header(" " * 10**6, version=(2, 0))}), "not a complete"),
        "version 9.9": (npz({"a.npy": header("{}", version=(9, 9))}), "not a complete"),
        "not npy": (npz({"readme.txt": b"hello"}), "not a complete"),
        "a folder": (npz({"a/": b""}), "not a complete"),
        "member of no bytes": (npz({"a.npy": b""}), "not a complete"),
        "name ../x": (npz({"../x.npy": npy(np.zeros(3))}), "leads out of"),
        "name with NUL": (npz({"a\0b.npy": npy(np.zeros(3))}), "no known format"),
        "name of lines": (npz({"a\nb.npy": npy(np.zeros(3))}), "no known format"),
        "array twice": (twice(), "'a' occurs twice"),
        "encrypted": (flagged(one, 6, 1), "encrypted"),
        "compression 99": (flagged(one, 8, 99), "other than deflate"),
        "compression bz2": (npz({"a.npy": npy(np.zeros(3))}, zipfile.ZIP_BZIP2), ""),
        "deflate spoilt": (spoilt, "not a complete|no known format"),
        "50 001 arrays": (npz({f"{i}.npy": b"" for i in range(50_001)}), "too many"),
    }  # fmt: skip
    return {name: Case({FILE: content}, message) for name, (content, message) in made.items()}


def mismatches() -> dict[str, Case]:
    """Whole archives whose arrays are not those of a model."""
    arrays = published()
    kernel, bias = arrays[KERNEL], arrays["head/bias"]
    query = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
    nan = np.full_like(bias, np.nan)
    stacks = {STACK + n.removeprefix("Transformer/encoderblock_0/"): a for n, a in arrays.items()
              if n.startswith("Transformer/encoderblock_0/")}  # fmt: skip
    rest = {n: a for n, a in arrays.items() if "encoderblock_" not in n}
    empty = {n: np.zeros((60_000, 0, *a.shape), np.float32) for n, a in stacks.items()}
    flat = {n: np.zeros(100_000, np.float32) for n in stacks}
    many = {f"{STACK}x{n}": np.zeros((1000, 0), np.float32) for n in range(51)}
    fortran = npz({f"{n}.npy": npy(np.asfortranarray(a)) for n, a in arrays.items()})
    big = npz({f"{n}.npy": npy(a.astype(">f4")) for n, a in arrays.items()})
    spoilt = bytearray(npz({f"{n}.npy": npy(a) for n, a in arrays.items()}))
    at = spoilt.index(kernel.tobytes()) + 400
    spoilt[at : at + 4] = b"\x01\x02\x03\x04"

    def stacked(more: dict[str, Any]) -> bytes:
        return npz({f"{n}.npy": npy(a) for n, a in {**rest, **more}.items()})

    made: dict[str, tuple[bytes, str]] = {
        "missing": (with_array("head/bias", None), "head/bias is missing"),
        "extra": (with_array("more", bias), "1 unknown tensor: more"),
        "wrong shape": (with_array("head/bias", np.zeros(5, np.float32)), "the model needs"),
        "transposed": (with_array(query, arrays[query].transpose(1, 2, 0)), ""),
        "query of two axes": (with_array(query, arrays[query].reshape(64, 64)), "not a valid file"),
        "whole numbers": (with_array("head/bias", bias.astype(np.int64)), "head/bias.*int64"),
        "unsigned numbers": (with_array("head/bias", bias.astype(np.uint16)), "head/bias.*uint16"),
        "complex": (with_array("head/bias", bias.astype(np.complex64)), "head/bias.*complex64"),
        "long doubles": (with_array("head/bias", bias.astype(np.longdouble)), "longdouble"),
        "strings": (with_array("head/bias", bias.astype("U8")), "head/bias"),
        "bytes": (with_array("head/bias", bias.astype("S8")), "head/bias"),
        "dates": (with_array("head/bias", bias.astype("M8[s]")), "head/bias"),
        "NaN": (with_array("head/bias", nan), "head/bias: 7 of 7 numbers"),
        "kernel spoilt": (bytes(spoilt), f"{KERNEL}: cannot be read: Bad CRC"),
        "scalar kernel": (with_array(KERNEL, np.float32(1)), "not a valid file"),
        "patch of no pixels": (with_array(KERNEL, np.zeros((0, 0, 3, 64), "f4")), "as google"),
        "stacks of nothing": (stacked(empty), "as google"),
        "stacks of 100 000": (stacked(flat), "as google"),
        "too many stacks": (stacked(many), "51 stacks of different heights, or of more"),
        "stacks of two heights": (stacked({**stacks, STACK + "x": np.zeros((9, 9))}), "as google"),
    }  # fmt: skip
    cases = {name: Case({FILE: content}, message, unseen=True)
             for name, (content, message) in made.items()}  # fmt: skip
    return cases | {
        "Fortran's order": Case({FILE: fortran}, accepted="the same numbers in another order"),
        "big-endian": Case({FILE: big}, accepted="the same numbers with their bytes turned"),
        "float16": Case({FILE: npz({f"{n}.npy": npy(a.astype(np.float16))
                                    for n, a in arrays.items()})},
                        accepted="half precision is widened, and inspect says so"),
    }  # fmt: skip

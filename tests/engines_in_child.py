"""Run by `test_engines.py` in a process of its own, which must not open an internet socket.

jaxtyping's checks would break the graphs. Each line of the output is the JSON of one case: engine,
model, and how far its logits are from the model's own.
"""

import json
import platform
import socket
import sys
import tempfile
import time
from pathlib import Path

from refused_sockets import SOCKET_CALLS, refuse_sockets

if __name__ == "__main__" and platform.machine() in SOCKET_CALLS:
    refuse_sockets()  # before any runtime is imported
    if "--open-a-socket" in sys.argv:
        socket.socket(socket.AF_INET)
        sys.exit("a socket was opened")

import numpy as np
import torch
from noise import fill_with_noise
from onnx import TensorProto, helper

import vitkit
from vitkit.engines.engine import build_engine
from vitkit.engines.registry import quiet_imports

SMALL = {"image_size": (32, 48), "patch_size": 8, "width": 32, "depth": 2, "num_heads": 2,
         "mlp_width": 64, "num_classes": 5}  # fmt: skip
MODELS = {
    "plain": {"layer_scale": 0.1},
    "registers": {"num_registers": 2, "mlp": "swiglu_packed", "activation": "silu",
                  "pooling": "cls_mean"},
    "rope": {"positions": "rope", "class_token": False, "pooling": "map"},
}  # fmt: skip
CASES = {
    "fast": [("openvino", "registers"), ("onnxruntime", "registers")],
    "all": [(engine, kind) for engine in ("openvino", "onnxruntime", "compile") for kind in MODELS],
}


def difference(engine: str, kind: str, folder: Path) -> float:
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL | MODELS[kind])).eval()
    fill_with_noise(model, std=0.2)
    images = torch.randn(5, 3, 32, 48)
    with torch.inference_mode():
        expected = model(images)
        found = []
        # converted, then read from the folder; two is the batch that it was converted with
        for count in (1, 2, 5) if engine != "compile" else (5,):
            run = build_engine(engine, model, threads=1, folder=folder / kind)
            found.append((run(images[:count]) - expected[:count]).abs().max().item())
            # a damaged file is converted again
            if count == 2 and (engine, kind) != ("openvino", "registers"):
                for file in (folder / kind).glob("*[lnx]"):
                    file.write_bytes(file.read_bytes()[:-4096].ljust(file.stat().st_size, b"\0"))
    return max(found) / expected.abs().max().item()


def run_and_wait() -> None:
    """Run a small ONNX model, then wait for what the runtime does by itself."""
    import onnxruntime

    shape = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [shape], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    session.run(None, {"x": np.ones(1, np.float32)})
    time.sleep(150)  # it reports after a minute or so, later on a busy machine


def quantise_a_model() -> None:
    """Quantise a model by NNCF and run it."""
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL)).eval()
    fill_with_noise(model, std=0.2)
    images = torch.randn(16, 3, 32, 48)
    run = build_engine("openvino", model, precision="int8", threads=1, calibration=images)
    with torch.inference_mode():
        cosine = torch.nn.functional.cosine_similarity(run(images), model(images)).min()
    assert cosine > 0.9
    sys.stdout.write(f"{'nncf' in sys.modules}\n")


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    if arguments == ["--quantise"]:
        quantise_a_model()
        return
    if arguments[0] == "--wait":
        if arguments[1] == "quietly":
            quiet_imports()
        run_and_wait()
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for engine, kind in CASES[arguments[0]]:
            far = difference(engine, kind, Path(name))
            rows.append({"engine": engine, "kind": kind, "difference": far})
        rows.append({"files": sorted(path.name for path in Path(name, "registers").glob("*[lnx]"))})
    sys.stdout.write("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1:])

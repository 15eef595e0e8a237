"""Export to torch.export and ONNX, with a dynamic batch size, and compare the logits."""

import os

import torch

import vitkit

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read by the import of ONNX Runtime
import onnxruntime

torch.manual_seed(0)
model = vitkit.create_model("vit_tiny_patch16_224", num_classes=10, image_size=64, depth=2).eval()
images = torch.rand(2, 3, 64, 64)
five = torch.rand(5, 3, 64, 64)  # a batch size that the export has not seen
expected = model(five).detach()

batch = torch.export.Dim("batch")
program = torch.export.export(model, (images,), dynamic_shapes=({0: batch},))
torch.export.save(program, "vit.pt2")
exported = torch.export.load("vit.pt2").module()
print("torch.export:", torch.allclose(exported(five), expected, atol=1e-5))

shapes = ({0: "batch"},)
torch.onnx.export(model, (images,), "vit.onnx", dynamo=True, dynamic_shapes=shapes, verbose=False)
session = onnxruntime.InferenceSession("vit.onnx", providers=["CPUExecutionProvider"])
(logits,) = session.run(None, {session.get_inputs()[0].name: five.numpy()})
print("ONNX:", torch.allclose(torch.from_numpy(logits), expected, atol=1e-4))

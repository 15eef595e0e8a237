"""Compile the model; ask the compiled model for attention maps."""

import torch

import vitkit

torch.manual_seed(0)
model = vitkit.create_model("vit_tiny_patch16_224", num_classes=10, image_size=64, depth=2).eval()
images = torch.rand(2, 3, 64, 64)
fast = torch.compile(model, backend="aot_eager")  # leave the backend out for the fastest one

with torch.no_grad():
    plain, compiled = model(images), fast(images)
    record = vitkit.Record(attention=[0])
    recorded = fast(images, record=record)

print("same logits:", torch.allclose(plain, compiled, atol=1e-5))
print("same logits with a record:", torch.allclose(plain, recorded, atol=1e-5))
print("maps:", tuple(record.attention[0].shape))

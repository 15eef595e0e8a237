"""Record the attention of every layer for a batch, and roll it out (Abnar and Zuidema 2020)."""

import torch

import vitkit

model = vitkit.create_model("vit_tiny_patch16_224", num_classes=10, depth=4).eval()
images = torch.rand(3, 3, 224, 224)

record = vitkit.Record(attention=range(4))  # the fused kernel stays in use
with torch.no_grad():
    logits = model(images, record=record)

rollout = torch.eye(197).expand(3, 197, 197)
for layer in range(4):
    maps = record.attention[layer].mean(1)  # (B, k, T, T) -> (B, T, T): the mean over the heads
    mixed = (maps + torch.eye(197)) / 2  # half of each token passes by the attention
    rollout = mixed @ rollout

of_the_class_token = rollout[:, 0, 1:].unflatten(1, (14, 14))  # (B, 14, 14) over the patches
print("logits", tuple(logits.shape), "rollout", tuple(of_the_class_token.shape))
print("the rows sum to 1:", torch.allclose(rollout.sum(-1), torch.ones(3, 197), atol=1e-5))

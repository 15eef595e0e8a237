"""Features of several layers, as maps and as tokens, by the calls of timm and DINOv2."""

import torch

import vitkit

model = vitkit.create_model("vit_small_patch14_reg4_dinov2", image_size=224, depth=6).eval()
images = torch.rand(2, 3, 224, 224)

with torch.no_grad():
    final, maps = model.forward_intermediates(images, indices=[1, 3, 5])  # timm
    layers = model.get_intermediate_layers(images, n=2, return_class_token=True)  # DINOv2
    features = model.forward_features(images)

print("maps:", [tuple(each.shape) for each in maps])
print("last two layers:", [(tuple(patches.shape), tuple(cls.shape)) for patches, cls in layers])
print("by kind:", features.cls.shape, features.registers.shape, features.patches.shape)
print("the last layer is the same:", torch.equal(layers[-1][1], features.cls))

backbone = vitkit.create_model("vit_tiny_patch16_224", features_only=True, out_indices=[5, 11])
print("a backbone's maps:", [tuple(each.shape) for each in backbone(torch.rand(1, 3, 224, 224))])

"""Replace the head, write a block of your own, and save what fits the format."""

import torch
from torch import nn

import vitkit

model = vitkit.create_model("vit_tiny_patch16_224", num_classes=10, image_size=32, depth=2)
images = torch.rand(2, 3, 32, 32)

model.reset_classifier(7)  # a new, random head; model.spec.num_classes is 7
print("seven classes:", tuple(model(images).shape))

preprocess = vitkit.Preprocess(image_size=32)
path = vitkit.save("seven.safetensors", model.eval(), preprocess=preprocess)
same = vitkit.load("seven.safetensors").model
print("loaded as saved:", torch.equal(same(images), model(images)))


class GatedBlock(vitkit.EncoderBlock):
    """An encoder block whose attention is weighted by a learned gate."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, tokens, *context):
        tokens = tokens + self.gate * self.attn(self.norm1(tokens), *context)
        return tokens + self.mlp(self.norm2(tokens))


model.blocks[1] = GatedBlock(width=192, num_heads=3, mlp_width=768)
record = vitkit.Record(attention=[1])
print("with the own block:", tuple(model(images, record=record).shape))
print("its maps:", tuple(record.attention[1].shape))

"""torchvision's ViT for our weights: its names for our keys, and a builder of any depth."""

from peers import peer, without_weights
from torch import nn

import vitkit

LAYER = "encoder.layers.encoder_layer_*"
TABLE = {  # ours -> theirs
    "cls_token": "class_token",
    "pos_embed": "encoder.pos_embedding",
    "patch_embed.proj": "conv_proj",
    "blocks.*.norm1": f"{LAYER}.ln_1",
    "blocks.*.attn.qkv.weight": f"{LAYER}.self_attention.in_proj_weight",
    "blocks.*.attn.qkv.bias": f"{LAYER}.self_attention.in_proj_bias",
    "blocks.*.attn.proj": f"{LAYER}.self_attention.out_proj",
    "blocks.*.norm2": f"{LAYER}.ln_2",
    "blocks.*.mlp.fc1": f"{LAYER}.mlp.0",
    "blocks.*.mlp.fc2": f"{LAYER}.mlp.3",
    "norm": "encoder.ln",
    "pre_logits.fc": "heads.pre_logits",
    "head": "heads.head",
}


def shallow(spec: vitkit.ViTSpec) -> nn.Module:
    """Theirs of two layers; the named builders fix the depth."""
    model = peer("torchvision.models.vision_transformer", "VisionTransformer")
    return without_weights(
        lambda: model(
            image_size=spec.image_size[0], patch_size=spec.patch_size[0], num_layers=spec.depth,
            num_heads=spec.num_heads, hidden_dim=spec.width, mlp_dim=spec.mlp_width,
            num_classes=spec.num_classes, representation_size=spec.representation_width,
        )
    )  # fmt: skip

"""Methods of timm, DINOv2 and transformers on a `ViT`: intermediate features, heads, folders.

The equations are in the modules above. `ViT` inherits `Backbone` and `Pretrained`.
"""

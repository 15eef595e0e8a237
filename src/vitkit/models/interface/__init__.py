"""The calls of timm, DINOv2 and transformers on a `ViT`: inner features, other heads, folders.

The equations are in the modules above. `ViT` inherits `Backbone` of `classifier`, which has the
calls of `intermediates` too, and `Pretrained`.
"""

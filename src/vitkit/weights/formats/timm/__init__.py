"""Files and folders of timm, for its `VisionTransformer` and `Eva` classes."""

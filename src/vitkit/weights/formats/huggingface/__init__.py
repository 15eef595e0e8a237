"""Folders of Hugging Face transformers: ViT, DeiT, DINOv2."""

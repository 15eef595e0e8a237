"""Folders of Hugging Face transformers."""

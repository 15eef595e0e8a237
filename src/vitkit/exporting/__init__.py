"""Exported models: written for another runtime, checked on the user's images, and read back."""

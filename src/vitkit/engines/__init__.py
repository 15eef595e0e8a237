"""Engines: ways to run a model fast, each a function from images to logits."""

"""Defaults of settings that follow from the training images."""

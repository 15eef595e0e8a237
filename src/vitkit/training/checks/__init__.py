"""Checks of the settings, and defaults that follow from other settings."""

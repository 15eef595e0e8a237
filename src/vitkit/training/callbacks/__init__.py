"""The concerns of a run between its steps, one a module."""

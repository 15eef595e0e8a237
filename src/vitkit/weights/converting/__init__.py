"""Writing a model in another format: folding, resizing, files, verification."""

"""Published checkpoint formats: each detects its files, infers the spec and renames tensors."""

"""The sections of `TrainConfig`: settings that belong together, one class and one file each."""

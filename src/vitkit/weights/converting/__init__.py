"""Between formats: exact folds, resizing, writing and the proof."""

"""Read and write checkpoints: `formats` has vitkit's own and all others, `files` opens files."""

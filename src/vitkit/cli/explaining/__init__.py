"""Parts of `vitkit explain` with work of their own."""

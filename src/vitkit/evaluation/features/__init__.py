"""Features of a frozen model, and classifiers that are fitted on them."""

"""Training: the settings of a run, its steps, the callbacks between them, and its state."""

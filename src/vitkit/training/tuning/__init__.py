"""Auto-tuning before training: precision, torch.compile, batch size and learning rate."""

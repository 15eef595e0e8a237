"""From images to predictions and features, in streams of any length."""

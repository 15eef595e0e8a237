"""`vitkit train DATA --auto`: candidates from cheap to expensive, compared on validation."""

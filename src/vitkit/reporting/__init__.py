"""What is written about a model for people to read."""

"""What cost models know of models and devices."""

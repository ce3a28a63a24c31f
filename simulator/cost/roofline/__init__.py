"""The cost of a step from a model's shape and a device's datasheet; docs/cost_models.md states the model."""

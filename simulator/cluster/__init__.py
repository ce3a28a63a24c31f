"""A whole mesh as a model: the live cluster table, policies and placement over instance models, in simulated time."""

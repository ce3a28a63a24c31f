"""Arrow's evaluation (sections 7.2 to 7.4) on modelled instances."""

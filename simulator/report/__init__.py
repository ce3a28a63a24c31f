"""The one report of every experiment: replay through the endpoint, simulation, comparison, chaos."""

"""What a fleet of many busy instances costs the control plane: `python -m benchmarks.fleet`."""

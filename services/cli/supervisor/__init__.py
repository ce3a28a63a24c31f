"""Runs and restarts the processes of a local mesh."""

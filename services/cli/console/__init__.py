"""Runs that are over, as a console that opens without a mesh."""

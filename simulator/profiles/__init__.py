"""Readers of measured tables, from a folder that the user gives."""

"""Specifications of models and devices that cost models compute from."""

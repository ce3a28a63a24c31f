"""Checks of a machine: `facts` are collected by `collect` and judged by `judge`."""

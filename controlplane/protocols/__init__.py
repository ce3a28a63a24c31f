"""Protocols between processes as pure state machines: events in, instructions out; no I/O, no clock."""

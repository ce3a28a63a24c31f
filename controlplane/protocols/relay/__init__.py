"""Tokens of a frontend's requests, from whichever worker has each: none lost and none doubled."""

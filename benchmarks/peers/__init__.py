"""Penstock's CPU per request and per streamed chunk beside that of other routers, in one run."""

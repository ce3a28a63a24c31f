"""Requests to replay: traces of real services in their published formats, and a synthetic one.

Parsers are pure (lines in, `TraceRequest`s out, lazily); only `source` opens files.
"""

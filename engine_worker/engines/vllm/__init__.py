"""vLLM behind the mesh's engine interface. Importing this package imports neither vLLM nor torch; only starting
an engine does."""

"""A server that runs already, of vLLM or another that speaks OpenAI's API, as an engine of the mesh.

`wire` says what is sent and what comes back, `load` and `follower` decide, `client` does HTTP, `engine` joins them.
"""

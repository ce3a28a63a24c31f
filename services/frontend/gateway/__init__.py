"""The gateway role: picks the endpoint of requests that pass an Envoy, as the Gateway API inference extension asks.

`stream` talks to Envoy, `picker` reads a prompt and has it placed, `endpoints` knows where instances are reached.
"""

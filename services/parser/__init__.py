"""The process that reads answers by vLLM's own parsers, for a frontend whose models need formats it has not itself.

vLLM's parsers are a library that needs no engine, but 465 MiB and 8 s of imports, and some of them slow down as a call
grows: hence a process of their own, which a frontend starts when a model needs it and may kill.
"""

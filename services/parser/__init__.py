"""The process in which vLLM's own parts render chats and read answers, for a frontend whose models need what it has not
itself.

They are a library that needs no engine, but some 500 MiB and 5 s of CPU, and some of its parsers slow down as a call
grows: hence a process of their own, which a frontend starts when a model or a request needs it and may kill.
"""

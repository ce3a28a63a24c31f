"""From an answer's text to its message: reasoning, content and calls of tools, as the text comes."""

"""Who scores an answer from 0 to 100.

interface    the interface, and how a judge is made
confidence   how sure the model was of its own tokens
exact        the right answer is known (demo tasks)
chat         the grade of a model behind an OpenAI-compatible endpoint, the mesh's own included
chain        judges in order, the next where one is down
parse        judges by the names that operators use
"""

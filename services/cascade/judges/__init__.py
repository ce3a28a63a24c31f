"""Who scores an answer from 0 to 100.

interface    what a judge is
confidence   how sure the model was of its own tokens
exact        the right answer is known (demo tasks)
chat         a model behind an OpenAI-compatible endpoint, the mesh's own included
grade        its grade, read from the probabilities of the tokens that it might have said
chain        judges in order, the next where one is down
parse        judges by the names that operators use
"""

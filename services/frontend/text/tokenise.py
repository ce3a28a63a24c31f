"""Tokenisation on the event loop: little work is done in place, much of it in a thread."""

from mesh.runtime import Threads
from services.frontend.text.chunked import ChunkedTokenizer

IN_PLACE_CHARACTERS = 16_384
"""About 2 ms of tokenisation: beyond it other streams would notice."""


async def tokenise(tokenizer: ChunkedTokenizer, text: str, threads: Threads) -> list[int]:
    """The ids of `text`."""
    found = tokenizer.look_up(text)
    if found.unseen_characters <= IN_PLACE_CHARACTERS:
        return tokenizer.complete(found, tokenizer.tokenise(found.unseen))
    return tokenizer.complete(found, await threads.run(tokenizer.tokenise, found.unseen))

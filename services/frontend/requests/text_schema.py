"""Bodies and answers of /tokenize and /detokenize, in vLLM's form."""

from typing import Annotated

import msgspec
from msgspec import Meta

from services.frontend.requests.schema import TokenId


class TokenizeTextRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize with a text"""

    model: Annotated[str, Meta(max_length=256)] = ""
    """May be left out where there is one model."""
    prompt: str
    add_special_tokens: bool = True
    """Put before and behind the text what the model wants around a prompt."""
    return_token_strs: bool | None = None


class TokenizeChatRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize with a conversation: the body of a chat completion, and this"""

    messages: list[msgspec.Raw]
    add_special_tokens: bool = False
    """Put around the rendered conversation, too, what the model wants around a prompt; chat templates bring it."""
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct):
    """POST /tokenize"""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize"""

    model: Annotated[str, Meta(max_length=256)] = ""
    """May be left out where there is one model."""
    tokens: list[TokenId]


class Detokenized(msgspec.Struct):
    """POST /detokenize"""

    prompt: str

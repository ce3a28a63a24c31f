"""The id of a request: the mesh's own, in which a client finds the one that it gave."""

import re
from typing import Final

from mesh.runtime import Entropy
from services.frontend.errors import bad_request

REQUEST_ID_HEADER: Final = "x-request-id"
"""Of a request: the client's id of it; of an answer: the same, or the mesh's id where the client gave none."""
MESH_ID_HEADER: Final = "x-penstock-request-id"
"""Of an answer: the id by which the mesh knows the request; also the `id` in the body."""
_SAFE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=+@~-]{0,127}", re.ASCII)
"""What needs no quoting in a path, a log line or a label, and can be no option of a command."""


def new_request_id(prefix: str, given: str | None, entropy: Entropy, param: str = REQUEST_ID_HEADER) -> str:
    """Unlike all others, also where clients give one id to several requests. Raises ApiError (400) for an id that has
    other characters than those of `_SAFE`, or too many. `param`: by what it was given."""
    if given is None:
        return f"{prefix}-{entropy.token_hex(16)}"
    if not _SAFE.fullmatch(given):
        raise bad_request(
            f"Invalid `{param}`: up to 128 letters, digits and characters of `._:=+@~-` are possible.",
            param,
            "invalid_value",
        )
    return f"{prefix}-{given}-{entropy.token_hex(4)}"


def id_headers(given: str | None, request_id: str) -> dict[str, str]:
    """The headers of an answer that say its ids. `given`: by the client, any text; `request_id`: the mesh's."""
    told = request_id if given is None or not _SAFE.fullmatch(given) else given
    return {REQUEST_ID_HEADER: told, MESH_ID_HEADER: request_id}

"""What an engine was asked for, or why it cannot be had."""

from collections.abc import Awaitable
from typing import TypeVar

from mesh.errors import PenstockError

T = TypeVar("T")


async def or_error(work: Awaitable[T]) -> T | PenstockError:
    """What goes wrong as it may is no bug, and a task set would log it as one."""
    try:
        return await work
    except PenstockError as error:
        return error

"""What an engine was asked for, or why it cannot be had."""

from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from mesh.errors import PenstockError

P = ParamSpec("P")
T = TypeVar("T")


async def or_error(call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T | PenstockError:
    """What `call` returns, or the error of the mesh that it raises: that is no bug, and a task set would log it as one.

    It takes a function and not a coroutine, which nobody would await where the task is cancelled before it begins.
    """
    try:
        return await call(*args, **kwargs)
    except PenstockError as error:
        return error

"""Holds certain tests to what makes them certain: they open no socket, start no process and never sleep.

Whatever does one of these waits for another party or for a clock, so that a busy machine can make it late. Such a test
is marked `live`.
"""

import asyncio
import multiprocessing.util
import os
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc._channel
import grpc._server
import grpc.aio._channel
import grpc.aio._server
import pytest

WATCHED: Final[tuple[tuple[Any, str, str], ...]] = (
    (socket.socket, "bind", "binds a socket"),
    (socket.socket, "connect", "connects a socket"),
    (socket.socket, "connect_ex", "connects a socket"),
    (grpc._channel.Channel, "__init__", "opens a gRPC channel"),
    (grpc._server._Server, "__init__", "makes a gRPC server"),
    (grpc.aio._channel.Channel, "__init__", "opens a gRPC channel"),
    (grpc.aio._server.Server, "__init__", "makes a gRPC server"),
    (subprocess.Popen, "__init__", "starts a process"),
    (multiprocessing.util, "spawnv_passfds", "starts a process"),
    (os, "fork", "starts a process"),
    (time, "sleep", "sleeps"),
    # When it is set, since the machine's speed decides whether it fires. The loop of virtual time is another class.
    (asyncio.BaseEventLoop, "call_at", "sets a timer of the real clock"),
)
SHOWN_FRAMES: Final = 4

ONCE: Final = ("matplotlib/font_manager.py", "ctypes/util.py")
"""Files of libraries that may do it: the first plot on a machine lists its fonts by a process, and whoever loads torch
lists the machine's libraries by one. The test that comes first is not at fault."""


class NotCertain(Exception):
    """A certain test did what only a live one may."""


class CertainGuard:
    """Notes what a test does that it must not. One for a whole run; `watching` is entered for each test."""

    def __init__(self) -> None:
        self._seen: list[str] | None = None
        for owner, name, what in WATCHED:
            setattr(owner, name, self._watched(getattr(owner, name), what))

    @contextmanager
    def watching(self, test: str) -> Iterator[None]:
        """Raises NotCertain in the end, so that no code under test can swallow it."""
        seen = self._seen = []
        try:
            yield
        finally:
            self._seen = None
        if seen:
            pytest.fail(f"{NotCertain(f'{test} {seen[0]}')}\nMark it `live`, or do without (docs/testing.md).", False)

    def _watched(self, watched: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self._seen is not None and not self._seen:
                stack = traceback.extract_stack()[:-1]
                if not any(frame.filename.endswith(ONCE) for frame in stack):
                    self._seen.append(f"{what}:\n{''.join(traceback.format_list(stack[-SHOWN_FRAMES:]))}")
            return watched(*arguments, **named)

        return call

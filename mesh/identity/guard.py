"""The guard at every gRPC port: it asks who calls, and opens only the doors of that role."""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc

from mesh.identity.doors import may_call
from mesh.identity.identity import Identity, the_identity

log = logging.getLogger(__name__)

_NAMES: Final = "x509_subject_alternative_name"


def names_of(context: Any) -> tuple[bytes, ...]:
    """In the certificate of the caller, which gRPC has verified; empty where it has none."""
    return tuple(context.auth_context().get(_NAMES, ()))


def identity_of(context: Any) -> Identity | None:
    """Of the caller, by its certificate; None if that names no member of a mesh."""
    return the_identity(name.decode(errors="replace") for name in names_of(context))


class IdentityGuard(grpc.aio.ServerInterceptor):
    """Answers PERMISSION_DENIED to whoever may not call a method, and logs it."""

    def __init__(self, trust_domain: str) -> None:
        """Callers of other trust domains are refused, whoever signed their certificates."""
        self._trust_domain = trust_domain
        self._guarded: dict[str, tuple[grpc.RpcMethodHandler, grpc.RpcMethodHandler]] = {}
        """By method: the handler, and the same behind this guard."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Called by gRPC for each call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        known = self._guarded.get(method)
        if known is None or known[0] is not handler:
            known = self._guarded[method] = (handler, self._behind(handler, method))
        return known[1]

    def _behind(self, handler: grpc.RpcMethodHandler, method: str) -> grpc.RpcMethodHandler:
        incoming, outgoing = ("stream" if is_stream else "unary" for is_stream in _streaming(handler))
        behaviour = getattr(handler, f"{incoming}_{outgoing}")

        async def serve(request: Any, context: Any) -> Any:
            await self._check(method, context)
            return await behaviour(request, context)

        async def serve_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check(method, context)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        # A servicer of another kind would be called unguarded.
        is_generator = inspect.isasyncgenfunction(behaviour)
        assert is_generator or inspect.iscoroutinefunction(behaviour), f"{method} is served by no coroutine function"
        return handler._replace(**{f"{incoming}_{outgoing}": serve_stream if is_generator else serve})

    async def _check(self, method: str, context: Any) -> None:
        caller = identity_of(context)
        if caller is not None and caller.trust_domain == self._trust_domain and may_call(caller, method):
            return
        who = "a certificate that names no member of a mesh" if caller is None else str(caller)
        log.error("a call was refused", extra={"method": method, "caller": who, "peer": context.peer()})
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            f"{who} may not call {method}; `penstock ca doors` says who may",
        )


def _streaming(handler: grpc.RpcMethodHandler) -> tuple[bool, bool]:
    return handler.request_streaming, handler.response_streaming

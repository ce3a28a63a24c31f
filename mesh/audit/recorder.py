"""Watches the orders among the calls of a gRPC server, and remembers each with its outcome."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from mesh.audit.log import AuditLog
from mesh.audit.orders import ORDER_METHODS, Order, OrderMethod, cut, shown_parameters
from mesh.identity.guard import identity_of

_OPERATOR = "operator"


class OrderRecorder(grpc.aio.ServerInterceptor):
    """Stands behind the guard: whoever that refuses has ordered nothing, and stands in the guard's own log."""

    def __init__(self, audit: AuditLog, unix_s: Callable[[], float]) -> None:
        self._audit = audit
        self._unix_s = unix_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Called by gRPC for each call."""
        handler = await continuation(handler_call_details)
        method = ORDER_METHODS.get(handler_call_details.method)
        if method is None or handler is None or handler.unary_unary is None:
            return handler
        return handler._replace(unary_unary=self._recorded(handler.unary_unary, method))

    def _recorded(
        self, behaviour: Callable[[Any, Any], Awaitable[Any]], method: OrderMethod
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        assert inspect.iscoroutinefunction(behaviour), "roles serve by coroutine functions"

        async def serve(request: Any, context: Any) -> Any:
            if not _is_of_a_person(request, context):
                return await behaviour(request, context)
            outcome = "cancelled by the caller"
            try:
                answer = await behaviour(request, context)
                outcome = _outcome(answer)
                return answer
            except Exception:
                outcome = f"{_code(context)}: {_text(context.details())}"
                raise
            finally:
                self._add(method, request, context, outcome)

        return serve

    def _add(self, method: OrderMethod, request: Any, context: Any, outcome: str) -> None:
        identity = identity_of(context)
        who = f"without identity, at {context.peer()}" if identity is None else str(identity)
        # Bytes that are no message have been made an error by the guard against garbage.
        parameters = shown_parameters(method, request) if isinstance(request, Message) else {}
        unix_ms = int(1000 * self._unix_s())
        self._audit.add(Order(unix_ms, who, method.order, self._audit.to, parameters, cut(outcome)))


def _is_of_a_person(request: Any, context: Any) -> bool:
    """Whether an operator orders, by a command, the console or a supervisor, and not a process of the mesh in the
    course of its duty. Without identities nobody can tell, but a rescheduler's orders bear its epoch."""
    identity = identity_of(context)
    if identity is not None:
        return identity.role == _OPERATOR
    fields = getattr(request, "DESCRIPTOR", None)
    return fields is None or "fencing" not in fields.fields_by_name or not request.HasField("fencing")


def _outcome(answer: Any) -> str:
    """Of an order that was answered: a move may not have happened all the same."""
    fields = answer.DESCRIPTOR.fields_by_name
    if "moved" in fields and not answer.moved:
        return f"not moved: {answer.reason}"
    if "removed" in fields and not answer.removed:
        return "there was none"
    return "done"


def _code(context: Any) -> str:
    """Of a call that failed. gRPC's own contexts say a number."""
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return str(code.name)
    return next((each.name for each in grpc.StatusCode if each.value[0] == code), "failed")


def _text(details: Any) -> str:
    return details.decode(errors="replace") if isinstance(details, bytes) else str(details or "")

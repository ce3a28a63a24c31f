"""The rescheduler's state as messages."""

from controlplane.policies.rescheduling.manager import ReschedulingManager
from controlplane.policies.rescheduling.migrations import OrderedMigration, OrderOutcome
from controlplane.policies.rescheduling.parameters import ReschedulerMode
from controlplane.scheduler.rescheduling.service import ReschedulingService
from penstock.v1 import scheduler_pb2

SHOWN_ORDERS = 20

_OUTCOMES = {
    OrderOutcome.UNDER_WAY: scheduler_pb2.ORDER_OUTCOME_UNDER_WAY,
    OrderOutcome.MOVED: scheduler_pb2.ORDER_OUTCOME_MOVED,
    OrderOutcome.STAYED: scheduler_pb2.ORDER_OUTCOME_STAYED,
}


def order_message(ordered: OrderedMigration) -> scheduler_pb2.ReschedulerOrder:
    """One order and what became of it."""
    return scheduler_pb2.ReschedulerOrder(
        request_id=ordered.order.request_id,
        source_instance_id=ordered.order.source_instance_id,
        target_instance_id=ordered.order.target_instance_id,
        reason=ordered.order.reason,
        ordered_unix_ms=ordered.ordered_unix_ms,
        outcome=_OUTCOMES[ordered.outcome],
        message=ordered.message,
        paused_ms=ordered.paused_ms,
        duration_ms=ordered.duration_ms,
    )


def status_message(service: ReschedulingService) -> scheduler_pb2.GetReschedulerResponse:
    """Mode, fallbacks, balances and the last orders."""
    manager, switch = service.manager, service.manager.switch
    fallbacks = switch.fallbacks.values()
    return scheduler_pb2.GetReschedulerResponse(
        mode=switch.mode,
        available=list(ReschedulerMode),
        fallback=", ".join(sorted({str(fallback.mode) for fallback in fallbacks})),
        fallback_reason="; ".join(fallback.reason for fallback in fallbacks),
        parameters=switch.parameters.values(),
        in_flight=manager.migrations.in_flight,
        orders=[order_message(ordered) for ordered in manager.migrations.latest(SHOWN_ORDERS)],
        balances=[_balance(manager, model) for model in manager.views],
        in_charge=service.lead.is_leading,
        moved_total=manager.migrations.moved_total,
        stayed_total=manager.migrations.stayed_total,
    )


def _balance(manager: ReschedulingManager, model: str) -> scheduler_pb2.ReschedulerBalance:
    view, balance = manager.views[model], manager.balances.get(model)
    message = scheduler_pb2.ReschedulerBalance(
        model=model, instances=len(view.instances), excluded=view.excluded, idle=manager.idle.get(model, "")
    )
    if balance is not None:
        message.mean_tokens = balance.mean_tokens
        message.variance = balance.variance
        message.expected_variance = balance.expected_variance
    return message

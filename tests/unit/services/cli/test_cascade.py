"""`penstock cascade set` tells a mistyped tier from one that is served."""

from mesh.membership import Member
from services.cli.cascade import unserved_tiers


def _worker(name: str, model: str) -> Member:
    return Member(
        role="worker",
        member_id=name,
        incarnation_id="1",
        address="127.0.0.1:1",
        metrics_address="127.0.0.1:2",
        attributes={"model": model},
    )


def test_tiers_without_an_instance_are_named_in_their_order() -> None:
    workers = [_worker("a-0", "a"), _worker("a-1", "a"), _worker("b-0", "b")]
    assert unserved_tiers(["c", "a", "d"], workers) == ["c", "d"]
    assert unserved_tiers(["a", "b"], workers) == []

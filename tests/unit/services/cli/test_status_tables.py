"""What `penstock status` says of instances beside its table."""

from services.cli.status_tables import obstacle_lines


def test_an_instance_that_cannot_move_requests_has_a_line() -> None:
    instances = [
        {"instance_id": "a", "load": {"transfer_obstacle": "eth0 was made anew"}},
        {"instance_id": "b", "load": {"transfer_obstacle": ""}},
        {"instance_id": "c", "load": {}},
        {"instance_id": "d"},
    ]
    assert obstacle_lines(instances) == ["a cannot move requests: eth0 was made anew"]

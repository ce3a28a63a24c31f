"""What operators may ask for, and the commands that do the same."""

import shlex

import click
import msgspec
import pytest
from click.testing import CliRunner

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.model.replica_kind import ReplicaKind
from services.cli.autoscale import command as command_module
from services.cli.main import penstock
from services.frontend.console.actions import (
    Action,
    Drain,
    Migrate,
    RemoveAutoscale,
    Restart,
    SetAutoscale,
    SetGoal,
    SetPolicy,
    SetRescheduler,
    decode_action,
)

EXAMPLES: list[Action] = [
    SetPolicy("linear", {"lambda": 0.7}),
    SetRescheduler("current", {"theta": 0.2}),
    Drain("demo-large-0"),
    Restart("worker", "demo-large-0"),
    Migrate("chatcmpl-1", "demo-large-1"),
    SetGoal("c", 8, ("a@H100", "b@H100"), quality=70.0),
    SetGoal("c", 8, ("a@H100",), latency_s=2.5),
    SetAutoscale(AutoscalePolicy("m", ttft_ms=1000.0)),
    SetAutoscale(
        AutoscalePolicy(
            "m",
            ttft_ms=1000.0,
            tpot_ms=50.0,
            e2e_ms=9000.0,
            share=0.95,
            minimum=0,
            maximum=4,
            price_per_hour=2.5,
            budget_per_hour=40.0,
            gpus=2,
            cold_start_s=30.0,
            capacity_per_s=1.5,
            interval_s=10.0,
            settle_s=0.0,
            idle_s=60.0,
            quantile=0.8,
            dry_run=True,
        )
    ),
    SetAutoscale(
        AutoscalePolicy(
            "m", ttft_ms=1000.0, kinds=(ReplicaKind(3.5, 4.2, "H100", 2, maximum=4), ReplicaKind(0.5, 1.0, pp=2))
        )
    ),
    RemoveAutoscale("m"),
]


@pytest.mark.parametrize("action", EXAMPLES, ids=lambda action: type(action).__name__)
def test_the_command_that_is_shown_is_one(action: Action) -> None:
    words = shlex.split(action.command)[1:]
    command: click.Command = penstock
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None
        command = found
    command.make_context("x", words)  # raises for what it does not take


@pytest.mark.parametrize("action", EXAMPLES, ids=lambda action: type(action).__name__)
def test_an_action_is_read_as_it_was_written(action: Action) -> None:
    assert decode_action(msgspec.json.encode(action)) == action


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"action": "reboot"}',
        b'{"action": "drain"}',
        b'{"action": "drain", "instance": ""}',
        b'{"action": "drain", "instance": "a", "force": true}',
        b'{"action": "goal", "cascade": "c", "gpus": 0, "tiers": ["a"]}',
        b'{"action": "policy", "name": "x", "parameters": {"a": "b"}}',
    ],
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_action(body)


def test_a_scale_is_set_by_the_command_as_by_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AutoscalePolicy] = []

    def note(store: str | None, mesh: str, policy: AutoscalePolicy) -> None:
        asked.append(policy)

    monkeypatch.setattr(command_module, "_asked", note)
    monkeypatch.setattr(command_module, "run", lambda _: [])
    actions = [action for action in EXAMPLES if isinstance(action, SetAutoscale)]
    for action in actions:
        done = CliRunner().invoke(penstock, shlex.split(action.command)[1:])
        assert done.exit_code == 0, done.output
    assert asked == [action.policy for action in actions]


def test_names_cannot_become_options_of_a_shell() -> None:
    assert shlex.split(Drain("a; rm -rf /").command) == ["penstock", "drain", "a; rm -rf /"]

"""The scheduler over loopback, fed by a monitor: placing, explaining, switching, falling back, coming back."""

import grpc
import pytest

from controlplane.policies.registry import OWN_POLICIES
from controlplane.scheduler.policy_config import POLICY_KEY
from penstock.v1 import scheduler_pb2, worker_pb2
from tests.still_clock import StillClock
from tests.unit.controlplane.local_mesh import (
    LocalMesh,
    PlayedWorker,
    Running,
    local_mesh,
    place_request,
    scheduler_stub,
    snapshot_until,
    states,
    until,
)

pytestmark = pytest.mark.live


async def ready_workers(mesh: LocalMesh, monitor: Running, *instance_ids: str) -> list[PlayedWorker]:
    workers = [await mesh.worker(monitor, instance_id) for instance_id in instance_ids]
    for worker in workers:
        await worker.load()
    return workers


def all_ready(*instance_ids: str):  # type: ignore[no-untyped-def]
    wanted = dict.fromkeys(instance_ids, "ready")
    return lambda snapshot: snapshot.synced and states(snapshot) == wanted


async def test_place_explain_and_end() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler()
        a, b = await ready_workers(mesh, monitor, "a", "b")
        await a.kv(1, 2, 3)
        await b.load(running_requests=1)
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, lambda s: all_ready("a", "b")(s) and s.instances[0].cached_blocks == 3)
            placed = await stub.Place(place_request("r1", block_hashes=[1, 2, 9]))
            assert placed.outcome == scheduler_pb2.PLACE_OUTCOME_PLACED
            assert (placed.instance_id, placed.address, placed.policy) == ("a", "a:1", "penstock")
            assert placed.cached_tokens == 32
            explained = await stub.Explain(scheduler_pb2.ExplainRequest(request_id="r1"))
            assert explained.chosen_instance_id == "a"
            assert "ms added to everybody" in explained.rule
            scores = {score.instance_id: score for score in explained.scores}
            assert scores["a"].indicators["cached_tokens"] == 32
            assert 0 < scores["a"].indicators["prefill_ms"] < scores["b"].indicators["prefill_ms"]
            assert 0 < scores["a"].score < scores["b"].score
            snapshot = await snapshot_until(stub, lambda s: True)
            assert [i.unreported_requests for i in snapshot.instances] == [1, 0]
            await a.load(running_requests=1, admitted=["r1"])
            snapshot = await snapshot_until(stub, lambda s: s.instances[0].load.running_requests == 1)
            assert snapshot.instances[0].unreported_requests == 0
        labels = {"policy": "penstock", "instance": "a"}
        assert scheduler.metric("penstock_scheduler_placements_total", **labels) == 1
        assert scheduler.metric("penstock_scheduler_decision_seconds_count") == 1
        assert scheduler.metric("penstock_scheduler_indexed_blocks") == 3
        assert scheduler.metric("penstock_scheduler_fallback") == 0


async def test_a_request_that_came_back_corrects_what_is_believed_of_its_instance() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler()
        a, b = await ready_workers(mesh, monitor, "a", "b")
        await a.load(queued_prefill_tokens=70)
        await b.load(queued_prefill_tokens=900)
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, lambda s: [i.load.queued_prefill_tokens for i in s.instances] == [70, 900])
            placed = await stub.Place(place_request("r", prompt_tokens=40))
            assert (placed.instance_id, placed.belief.queued_prefill_tokens) == ("a", 70)
            assert (placed.belief.new_prefill_tokens, placed.belief.may_bounce) == (40, True)
            again = place_request("r", prompt_tokens=40)
            again.bounced_by.instance_id = "a"
            again.bounced_by.present.queued_prefill_tokens, again.bounced_by.present.requests = 8000, 3
            stream = stub.PlaceStream()
            ended = scheduler_pb2.RequestEnded(request_id="r")
            await stream.write(scheduler_pb2.SchedulerMessage(place=again, ended=[ended]))
            placed = await stream.read()
            assert (placed.instance_id, placed.belief.queued_prefill_tokens) == ("b", 900)
            snapshot = await snapshot_until(stub, lambda s: True)
            assert [i.unreported_requests for i in snapshot.instances] == [3, 1]
            await a.load(queued_prefill_tokens=8000)
            await snapshot_until(stub, lambda s: s.instances[0].unreported_requests == 0)
        assert scheduler.metric("penstock_scheduler_bounces_total", instance="a") == 1


async def test_the_stream_places_many_and_takes_in_their_ends() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler()
        await ready_workers(mesh, monitor, "a", "b")
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, all_ready("a", "b"))
            stream = stub.PlaceStream()
            for number in range(10):
                await stream.write(scheduler_pb2.SchedulerMessage(place=place_request(f"r{number}")))
            answers = [await stream.read() for _ in range(10)]
            assert [answer.request_id for answer in answers] == [f"r{number}" for number in range(10)]
            assert [answer.instance_id for answer in answers].count("a") == 5
            for number in range(9):
                ended = scheduler_pb2.RequestEnded(request_id=f"r{number}", ok=True)
                await stream.write(scheduler_pb2.SchedulerMessage(ended=[ended]))
            snapshot = await snapshot_until(stub, lambda s: sum(i.unreported_requests for i in s.instances) < 2)
            assert sum(i.unreported_requests for i in snapshot.instances) == 1
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF


def linked(*workers: tuple[str, str]) -> scheduler_pb2.SchedulerMessage:
    report = [scheduler_pb2.LinkedWorker(instance_id=name, incarnation_id=life) for name, life in workers]
    return scheduler_pb2.SchedulerMessage(links=scheduler_pb2.LinkReport(workers=report))


@pytest.mark.slow
async def test_only_what_the_frontend_is_connected_to_is_chosen_for_it_and_explain_tells() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler()
        await ready_workers(mesh, monitor, "a", "b")
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, all_ready("a", "b"))
            stream = stub.PlaceStream()
            message = linked(("b", "1"))
            for number in range(6):
                message.place.CopyFrom(place_request(f"r{number}"))
                await stream.write(message)
                assert (await stream.read()).instance_id == "b"
            explanation = await stub.Explain(scheduler_pb2.ExplainRequest(request_id="r5"))
            assert {score.instance_id: score.excluded for score in explanation.scores} == {
                "a": "is not connected to the frontend of this request",
                "b": "",
            }
            other = stub.PlaceStream()
            await other.write(scheduler_pb2.SchedulerMessage(place=place_request("another frontend's")))
            assert (await other.read()).instance_id == "a"


async def test_an_instance_cut_from_its_monitor_is_placed_on_while_a_frontend_is_connected_to_it() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler()
        await mesh.announce("worker", "a")
        (a,) = await ready_workers(mesh, monitor, "a")
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, all_ready("a"))
            stream = stub.PlaceStream()
            message = linked(("a", "1"))
            message.place.CopyFrom(place_request("before"))
            await stream.write(message)
            assert (await stream.read()).instance_id == "a"
            a.break_off()
            await snapshot_until(stub, lambda s: [each.state for each in s.instances] == ["unmonitored"])
            await stream.write(scheduler_pb2.SchedulerMessage(place=place_request("after")))
            assert (await stream.read()).instance_id == "a"
            assert scheduler.metric("penstock_scheduler_unmonitored_instances") == 1
            stream.cancel()
            await snapshot_until(stub, lambda s: [each.state for each in s.instances] == ["stale"])


async def test_what_cannot_be_placed_is_answered_with_a_reason() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler()
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, lambda s: s.synced)
            (a,) = await ready_workers(mesh, monitor, "a")
            await snapshot_until(stub, all_ready("a"))
            unknown = await stub.Place(place_request(model="gpt"))
            assert unknown.outcome == scheduler_pb2.PLACE_OUTCOME_UNKNOWN_MODEL
            assert "models served: m" in unknown.message
            failed = await stub.Place(place_request(excluded_instance_ids=["a"]))
            assert failed.outcome == scheduler_pb2.PLACE_OUTCOME_NO_INSTANCE
            assert "a has failed this request before" in failed.message
            await a.load(state=worker_pb2.INSTANCE_STATE_DRAINING)
            await snapshot_until(stub, lambda s: states(s) == {"a": "draining"})
            assert "a is draining" in (await stub.Place(place_request())).message
            a.break_off()
            await snapshot_until(stub, lambda s: not s.instances)
            assert "every instance of 'm' has gone" in (await stub.Place(place_request())).message
            with pytest.raises(grpc.aio.AioRpcError) as unexplained:
                await stub.Explain(scheduler_pb2.ExplainRequest(request_id="nobody"))
            assert unexplained.value.code() is grpc.StatusCode.NOT_FOUND
        assert scheduler.metric("penstock_scheduler_refusals_total", outcome="PLACE_OUTCOME_NO_INSTANCE") == 3


async def test_several_models_at_once() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler()
        small = await mesh.worker(monitor, "s", model="small")
        large = await mesh.worker(monitor, "l", model="large")
        await small.load()
        await large.load()
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, all_ready("s", "l"))
            for number in range(3):
                assert (await stub.Place(place_request(f"s{number}", model="small"))).instance_id == "s"
                assert (await stub.Place(place_request(f"l{number}", model="large"))).instance_id == "l"


@pytest.mark.slow
async def test_a_stale_instance_gets_nothing_until_it_is_fresh_again() -> None:
    clock = StillClock()
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(clock=clock), await mesh.scheduler()
        hung, lively = await ready_workers(mesh, monitor, "hung", "lively")
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, all_ready("hung", "lively"))
            clock.at_s += 1.9
            await lively.load(running_requests=50)
            await snapshot_until(stub, lambda s: any(i.load.running_requests == 50 for i in s.instances))
            clock.at_s += 0.2
            await snapshot_until(stub, lambda s: states(s) == {"hung": "stale", "lively": "ready"})
            assert {(await stub.Place(place_request(f"r{n}"))).instance_id for n in range(5)} == {"lively"}
            await hung.load()
            await snapshot_until(stub, all_ready("hung", "lively"))
            assert (await stub.Place(place_request("r"))).instance_id == "hung"


async def test_a_switch_of_policy_reaches_all_schedulers_and_is_kept() -> None:
    async with local_mesh() as mesh:
        monitor = await mesh.monitor()
        first, second = await mesh.scheduler("scheduler-0"), await mesh.scheduler("scheduler-1")
        await ready_workers(mesh, monitor, "a")
        async with scheduler_stub(first) as one, scheduler_stub(second) as two:
            await snapshot_until(one, all_ready("a"))
            assert (await one.SetPolicy(scheduler_pb2.SetPolicyRequest(policy="least_loaded"))).policy == "least_loaded"
            assert (await one.Place(place_request())).policy == "least_loaded"
            get = scheduler_pb2.GetPolicyRequest()
            answer = await until(lambda: two.GetPolicy(get), lambda policy: policy.policy == "least_loaded")
            assert list(answer.available) == list(OWN_POLICIES)
            with pytest.raises(grpc.aio.AioRpcError, match="there is no placement policy 'best'") as refused:
                await one.SetPolicy(scheduler_pb2.SetPolicyRequest(policy="best"))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        entry = await mesh.store.get(POLICY_KEY)
        assert entry is not None
        assert entry.value == b'{"name":"least_loaded"}'
        third = await mesh.scheduler("scheduler-2")
        async with scheduler_stub(third) as stub:
            await until(lambda: stub.GetPolicy(get), lambda policy: policy.policy == "least_loaded")


@pytest.mark.slow
async def test_a_policy_s_parameters_reach_all_schedulers_and_are_kept() -> None:
    async with local_mesh() as mesh:
        first, second = await mesh.scheduler("scheduler-0"), await mesh.scheduler("scheduler-1")
        get = scheduler_pb2.GetPolicyRequest()
        async with scheduler_stub(first) as one, scheduler_stub(second) as two:
            tuned = scheduler_pb2.SetPolicyRequest(policy="linear", parameters={"lambda": 0.55})
            assert dict((await one.SetPolicy(tuned)).parameters) == {"lambda": 0.55}
            answer = await until(lambda: two.GetPolicy(get), lambda policy: policy.policy == "linear")
            assert dict(answer.parameters) == {"lambda": 0.55}
            entry = await mesh.store.get(POLICY_KEY)
            assert entry is not None
            assert entry.value == b'{"name":"linear","parameters":{"lambda":0.55}}'
            for parameters in ({"lambda": 2}, {"mu": 0.5}, {"lambda": float("nan")}):
                refused = scheduler_pb2.SetPolicyRequest(policy="linear", parameters=parameters)
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await one.SetPolicy(refused)
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert dict((await one.GetPolicy(get)).parameters) == {"lambda": 0.55}
            whole = scheduler_pb2.SetPolicyRequest(policy="filter", parameters={"range": 4})
            assert dict((await one.SetPolicy(whole)).parameters) == {"range": 4}


@pytest.mark.slow
async def test_instances_that_the_policy_left_out_are_explained_without_infinities() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler(policy="random_two")
        await ready_workers(mesh, monitor, "a", "b", "c")
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, all_ready("a", "b", "c"))
            await stub.Place(place_request("r"))
            explanation = await stub.Explain(scheduler_pb2.ExplainRequest(request_id="r"))
            assert sorted(score.excluded for score in explanation.scores) == ["", "", "left out by the policy"]
            assert {score.score for score in explanation.scores} == {0.0}


async def test_the_last_placements_are_listed_with_their_best_options() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler()
        a, *_ = await ready_workers(mesh, monitor, "a", "b", "c", "d")
        await a.load(running_requests=3)
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, lambda s: s.instances and s.instances[0].load.running_requests == 3)
            for number in range(3):
                await stub.Place(place_request(f"r{number}", excluded_instance_ids=["d"]))
            answer = await stub.ListPlacements(scheduler_pb2.ListPlacementsRequest(limit=2, options=2))
            assert [each.explanation.request_id for each in answer.placements] == ["r2", "r1"], "latest first"
            for each in answer.placements:
                assert (each.instances, each.excluded) == (4, 1)
                options = [score.instance_id for score in each.explanation.scores]
                assert options[0] == each.explanation.chosen_instance_id
                assert len(options) == 2
                assert "d" not in options


async def test_a_record_without_parameters_takes_the_defaults() -> None:
    async with local_mesh() as mesh:
        await mesh.store.put(POLICY_KEY, b'{"name":"linear"}')
        scheduler = await mesh.scheduler()
        get = scheduler_pb2.GetPolicyRequest()
        async with scheduler_stub(scheduler) as stub:
            answer = await until(lambda: stub.GetPolicy(get), lambda policy: policy.policy == "linear")
            assert dict(answer.parameters) == {"lambda": 0.7}


async def test_a_policy_that_cannot_be_used_is_ignored_loudly(caplog: pytest.LogCaptureFixture) -> None:
    async with local_mesh() as mesh:
        scheduler = await mesh.scheduler(policy="least_loaded")
        async with scheduler_stub(scheduler) as stub:
            await mesh.store.put(POLICY_KEY, b'{"name":"from the future"}')
            await mesh.store.put(POLICY_KEY, b"not json")
            await stub.SetPolicy(scheduler_pb2.SetPolicyRequest(policy="lmetric"))
            assert caplog.text.count("cannot be used and is ignored") == 2
            await mesh.store.delete(POLICY_KEY)
            get = scheduler_pb2.GetPolicyRequest()
            await until(lambda: stub.GetPolicy(get), lambda policy: policy.policy == "least_loaded")


@pytest.mark.slow
async def test_without_a_monitor_the_fallback_places_on_the_last_known_instances() -> None:
    clock = StillClock()
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler(clock=clock)
        await mesh.announce("worker", "b")
        await ready_workers(mesh, monitor, "a", "b")
        get = scheduler_pb2.GetPolicyRequest()
        async with scheduler_stub(scheduler) as stub:
            early = await stub.GetPolicy(get)
            assert early.fallback in ("", "round_robin")
            await snapshot_until(stub, all_ready("a", "b"))
            await until(lambda: stub.GetPolicy(get), lambda policy: not policy.fallback)
            await mesh.kill(monitor)
            await snapshot_until(stub, lambda s: not s.synced)
            assert (await stub.Place(place_request("r1"))).policy == "penstock", "not at once"
            clock.at_s += 2.1
            policy = await until(lambda: stub.GetPolicy(get), lambda policy: policy.fallback == "round_robin")
            assert policy.policy == "penstock"
            assert "silent" in policy.fallback_reason
            placed = [await stub.Place(place_request(f"r{number}")) for number in range(4)]
            assert {answer.policy for answer in placed} == {"round_robin"}
            assert [answer.instance_id for answer in placed] == ["a", "b", "a", "b"]
            assert scheduler.metric("penstock_scheduler_fallback") == 1
            # A worker whose lease ends meanwhile is gone all the same.
            await mesh.withdraw("worker", "b")
            await snapshot_until(stub, lambda s: list(states(s)) == ["a"])
            # Another monitor appears, and the workers report to it.
            successor = await mesh.monitor("monitor-0")
            await ready_workers(mesh, successor, "a", "b")
            await snapshot_until(stub, all_ready("a", "b"))
            await until(lambda: stub.GetPolicy(get), lambda policy: not policy.fallback)
            assert (await stub.Place(place_request("r9"))).policy == "penstock"


@pytest.mark.slow
async def test_a_restarted_scheduler_knows_everything_again() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler()
        (a,) = await ready_workers(mesh, monitor, "a")
        await a.kv(*range(1, 10_000))
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, lambda s: s.instances and s.instances[0].cached_blocks == 9999)
        await mesh.kill(scheduler)
        restarted = await mesh.scheduler()
        async with scheduler_stub(restarted) as stub:
            await snapshot_until(stub, lambda s: all_ready("a")(s) and s.instances[0].cached_blocks == 9999)
            assert (await stub.Place(place_request(block_hashes=[1, 2]))).cached_tokens == 32


async def test_before_a_monitor_was_heard_nothing_is_called_unknown() -> None:
    async with local_mesh() as mesh:
        scheduler = await mesh.scheduler()
        async with scheduler_stub(scheduler) as stub:
            answer = await stub.Place(place_request())
            assert answer.outcome == scheduler_pb2.PLACE_OUTCOME_NOT_READY
            assert "not heard from a monitor yet" in answer.message


async def test_a_placed_request_that_never_arrives_is_forgotten() -> None:
    clock = StillClock()
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler(clock=clock)
        await ready_workers(mesh, monitor, "a")
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, all_ready("a"))
            await stub.Place(place_request())
            await snapshot_until(stub, lambda s: s.instances[0].unreported_requests == 1)
            clock.at_s += 5.1
            await snapshot_until(stub, lambda s: s.instances[0].unreported_requests == 0)
        assert scheduler.metric("penstock_scheduler_forgotten_requests_total") == 1


async def test_both_phases_are_placed_explained_and_counted() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler()
        decoder = await mesh.worker(monitor, "d", phase="DECODE")
        prefiller = await mesh.worker(monitor, "p", phase="PREFILL")
        for worker in (decoder, prefiller):
            await worker.load()
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, all_ready("d", "p"))
            placed = await stub.Place(place_request("r1"))
            assert (placed.instance_id, placed.decode_instance_id) == ("p", "d")
            snapshot = await snapshot_until(stub, lambda s: True)
            assert [(i.phase, i.unreported_decodes) for i in snapshot.instances] == [("decode", 1), ("prefill", 0)]
            explained = await stub.Explain(scheduler_pb2.ExplainRequest(request_id="r1"))
            assert (explained.chosen_instance_id, explained.decode_instance_id) == ("p", "d")
            assert "KV tokens" in explained.decode_rule
            scores = {score.instance_id: score for score in explained.scores}
            assert scores["d"].decode_score == pytest.approx(100 / 1600)
            assert not scores["p"].HasField("decode_score")
            assert scores["d"].excluded == "is for decode only"
            await decoder.load(running_requests=1, admitted=["r1"])
            await snapshot_until(stub, lambda s: s.instances[0].unreported_decodes == 0)
            again = await stub.Place(place_request("r1", is_decoding=True))
            assert (again.instance_id, again.decode_instance_id) == ("d", "")
            await decoder.load(state=worker_pb2.INSTANCE_STATE_DRAINING)
            await snapshot_until(stub, lambda s: s.instances[0].state == "draining")
            alone = await stub.Place(place_request("r2"))
            assert (alone.instance_id, alone.decode_instance_id) == ("p", "")
            explained = await stub.Explain(scheduler_pb2.ExplainRequest(request_id="r2"))
            assert explained.decode_instance_id == "p"
            assert "does both" in explained.decode_rule
        assert scheduler.metric("penstock_scheduler_split_placements_total", instance="d") == 1


@pytest.mark.slow
async def test_arrow_chooses_who_decodes_at_the_end_of_the_prefill_and_shows_its_pools() -> None:
    async with local_mesh() as mesh:
        monitor, scheduler = await mesh.monitor(), await mesh.scheduler(policy="arrow")
        await ready_workers(mesh, monitor, "a", "b")
        async with scheduler_stub(scheduler) as stub:
            await snapshot_until(stub, all_ready("a", "b"))
            placed = await stub.Place(place_request("r1", max_tokens=50))
            assert (placed.instance_id, placed.decode_instance_id, placed.is_decode_open) == ("a", "", True)
            snapshot = await snapshot_until(stub, lambda s: all(i.pool for i in s.instances))
            assert {i.instance_id: i.pool for i in snapshot.instances} == {"a": "prefill", "b": "decode"}
            assert scheduler.metric("penstock_scheduler_pool", instance="a", pool="prefill") == 1
            explained = await stub.Explain(scheduler_pb2.ExplainRequest(request_id="r1"))
            assert explained.decode_rule == "to be chosen at the end of the prefill"
            assert {score.instance_id: score.pool for score in explained.scores} == {"a": "prefill", "b": "decode"}
            asked = scheduler_pb2.PlaceDecodeRequest(
                request_id="r1", model="m", prompt_tokens=100, max_tokens=50, prefill_instance_id="a"
            )
            assert (await stub.PlaceDecode(asked)).instance_id == "b"
            explained = await stub.Explain(scheduler_pb2.ExplainRequest(request_id="r1"))
            assert (explained.chosen_instance_id, explained.decode_instance_id) == ("a", "b")
            assert "Max Running Tokens" in explained.decode_rule
            snapshot = await snapshot_until(stub, lambda s: True)
            assert [i.unreported_decodes for i in snapshot.instances] == [0, 1]
            stream = stub.PlaceStream()
            message = linked(("a", "1"))
            message.place.CopyFrom(place_request("unlinked", max_tokens=50))
            await stream.write(message)
            assert (await stream.read()).is_decode_open
            asked.request_id = "unlinked"
            assert (await stub.PlaceDecode(asked)).instance_id == "", "its frontend is not connected to b"
            one = await stub.Place(place_request("r2", max_tokens=1))
            assert not one.is_decode_open
            await stub.SetPolicy(scheduler_pb2.SetPolicyRequest(policy="lmetric"))
            asked.request_id = "r3"
            assert (await stub.PlaceDecode(asked)).instance_id == "", "no policy that moves it is in force any more"

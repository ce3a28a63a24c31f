"""What a seed draws. Timelines that are to stay, whatever becomes of this, are kept as JSON."""

import random
from typing import Any, Final

import msgspec

from fault_simulation.actions import (
    ApplyPlan,
    Drain,
    Migrate,
    OperatorAction,
    PlanStages,
    Restart,
    RollingRestart,
    SetCascade,
    SwitchPolicy,
    SwitchRescheduler,
    SwitchStages,
)
from fault_simulation.background import KEPT
from fault_simulation.occasions import with_occasion
from fault_simulation.oracle import CHAT_PATH, COMPLETIONS_PATH
from fault_simulation.timeline import (
    ADAPTERS,
    CASCADE,
    CLIENT,
    FIRST_FAULT_S,
    FIRST_REQUEST_S,
    HEALED_S,
    LARGE,
    LARGEST_ANSWER_TOKENS,
    LAST_REQUEST_S,
    MODEL,
    STORE,
    BreakEngine,
    ChangeBlocks,
    Compact,
    Cut,
    DeleteKeys,
    Fault,
    FullDisk,
    FullHostDisk,
    Kill,
    KillInWrite,
    LosePower,
    Operation,
    Pause,
    Phase,
    Request,
    Slow,
    StepClock,
    Terminate,
    Timeline,
    Topology,
    Wipe,
)

OPERATED_EVERY: Final = 4
"""One seed of so many is of a mesh with all roles, with operators at work in it."""
ADAPTERS_SHARE: Final = 0.15
"""Of the meshes that nobody supervises."""
PREFIXES_SHARE: Final = 0.25
"""Of the meshes in which many prompts begin alike, with so much that it is worth pulling."""
PREFIX: Final = "Of what was said before, this is the part that all have in common. "
HOST_SHARE: Final = 0.25
"""Of all meshes: their workers keep KV in the memory of a host that they share."""
HOST_DISK_SHARE: Final = 0.5
"""Of those: they keep it on the disk of that host, too."""
BACKGROUND_EVERY: Final = 10
"""In one seed of so many chats are responses in the background, of two or three frontends of which some are lost."""
FRAMED_EVERY: Final = 10
"""In one seed of so many streams go in frames."""
LAST_STORE_FAULT_S: Final = 18.0
"""Of a supervised mesh, where it takes all else with it: time enough for everything to drain and to be started."""


def draw(seed: int) -> Timeline:
    """The timeline of a seed."""
    is_operated = seed % OPERATED_EVERY == OPERATED_EVERY - 1
    topology = (_draw_operated_topology if is_operated else _draw_topology)(random.Random(f"{seed}/topology"))
    is_in_background = seed % BACKGROUND_EVERY == 0
    if is_in_background:
        topology = msgspec.structs.replace(topology, frontends=2 + seed // BACKGROUND_EVERY % 2)
    rng = random.Random(f"{seed}/requests")
    numbers = range(rng.randint(8, 20) if is_operated else rng.randint(12, 30))
    requests = [_draw_request(random.Random(f"{seed}/request/{number}"), number, topology) for number in numbers]
    rng = random.Random(f"{seed}/faults")
    numbers = range(rng.randint(0, 5) if is_operated else rng.randint(1, 8))
    faults = [_draw_fault(random.Random(f"{seed}/fault/{number}"), topology) for number in numbers]
    faults += _draw_long_cut(random.Random(f"{seed}/long cut"), topology)
    operations: list[Operation] = []
    if is_operated:
        faults = [fault for fault in faults if not topology.supervised or _leaves_time(fault)]
        faults += _draw_broken_engine(random.Random(f"{seed}/engine"), topology)
        requests = [_of_models(random.Random(f"{seed}/model/{one.number}"), one, topology) for one in requests]
        numbers = range(random.Random(f"{seed}/operations").randint(2, 7))
        operations = [_draw_operation(random.Random(f"{seed}/operation/{number}"), topology) for number in numbers]
    if is_in_background:
        requests = [_in_background(random.Random(f"{seed}/background/{one.number}"), one) for one in requests]
        faults += _draw_frontend_faults(random.Random(f"{seed}/frontends"), topology)
    topology, requests = _with_adapters(random.Random(f"{seed}/adapters"), topology, requests)
    rng = random.Random(f"{seed}/prefixes")
    if rng.random() < PREFIXES_SHARE:
        requests = _with_prefixes(rng, requests)
        faults += _draw_pull_faults(random.Random(f"{seed}/pull faults"), topology, requests)
    topology, changes = _with_host(random.Random(f"{seed}/host"), topology)
    topology, troubles = _with_host_disk(random.Random(f"{seed}/host disk"), topology)
    faults += [*changes, *troubles]
    is_framed = seed % FRAMED_EVERY == FRAMED_EVERY - 1
    timeline = Timeline(
        seed,
        msgspec.structs.replace(topology, framed=is_framed),
        tuple(sorted(requests, key=lambda request: request.at_s)),
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        tuple(sorted(operations, key=lambda operation: operation.at_s)),
    )
    return timeline if is_operated or is_in_background else with_occasion(random.Random(f"{seed}/occasions"), timeline)


def _draw_topology(rng: random.Random) -> Topology:
    workers = rng.randint(2, 4)
    phases: tuple[Phase, ...] = tuple("any" for _ in range(workers))
    policy = rng.choice(("lmetric", "penstock", "penstock", "round_robin", "least_loaded", "arrow"))
    if workers > 2 and rng.random() < 0.25:
        kinds: tuple[Phase, ...] = ("prefill", "decode", "any")
        phases = ("prefill", "decode", *rng.choices(kinds, k=workers - 2))
    topology = Topology(
        frontends=rng.choice((1, 1, 2)),
        schedulers=rng.choice((1, 2)),
        monitors=rng.choice((1, 1, 2)),
        phases=phases,
        kv_blocks=rng.choice((4096, 4096, 160)),
        policy=policy,
        rescheduler=rng.choice(("off", "off", "current", "predicted")),
    )
    topology = msgspec.structs.replace(topology, instance_wait_s=rng.choice((30.0, 30.0, 30.0, 4.0)))
    return _by_trajectories(rng, topology)


def _by_trajectories(rng: random.Random, topology: Topology) -> Topology:
    """Half of those that reschedule by predictions; drawn last, so that nothing else of a seed depends on it."""
    if topology.rescheduler == "predicted" and rng.random() < 0.5:
        return msgspec.structs.replace(topology, rescheduler="trajectories")
    return topology


def _draw_request(rng: random.Random, number: int, topology: Topology) -> Request:
    body = _draw_body(rng)
    path = CHAT_PATH if "messages" in body else COMPLETIONS_PATH
    at_s = round(rng.uniform(FIRST_REQUEST_S, LAST_REQUEST_S), 3)
    frontend = rng.randrange(topology.frontends)
    chance = rng.random()
    if chance < 0.1:
        return Request(number, at_s, path, body, frontend, "leaves", round(rng.expovariate(1.0), 3))
    if chance < 0.15:
        after_s, for_s = rng.uniform(0.0, 1.0), rng.uniform(0.5, HEALED_S - LAST_REQUEST_S)
        return Request(number, at_s, path, body, frontend, "stalls", round(after_s, 3), round(for_s, 3))
    if chance < 0.35 and body["stream"] and "logprobs" not in body:  # of others, the rest cannot be had
        return Request(
            number,
            at_s,
            path,
            body,
            frontend,
            "returns",
            round(rng.expovariate(0.3), 3),
            round(rng.uniform(0.0, 3.0), 3),
        )
    return Request(number, at_s, path, body, frontend)


def _draw_body(rng: random.Random) -> dict[str, Any]:
    """No `logit_bias`: a map of a protobuf message has no fixed order on the wire, and so no fixed digest."""
    common = rng.choice(("", "", "Of what was said before, this is the part that all have in common. " * 4))
    words = common + " ".join(str(rng.randrange(1000)) for _ in range(rng.choice((3, 20, 60, 200))))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.choice((1, 8, 40, 80, 80, 200, LARGEST_ANSWER_TOKENS)),
        "stream": rng.random() < 0.8,
        "n": rng.choice((1, 1, 1, 2, 3)),
        "temperature": rng.choice((0.0, 1.0)),
    }
    if rng.random() < 0.3:
        body["ignore_eos"] = True
    if rng.random() < 0.5:
        body["seed"] = rng.randrange(1000)
    if rng.random() < 0.3:
        body["stop"] = [rng.choice("aeiou0123"), *rng.choices(("the", "zz", "ab", "\n"), k=rng.randrange(3))]
    if rng.random() < 0.2:
        body["priority"] = rng.choice((-1, 1))
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    is_chat = rng.random() < 0.5
    if rng.random() < 0.2:
        body.update({"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2})
    if is_chat:
        body["messages"] = [{"role": "user", "content": words}]
        return {**body, **_draw_limits(random.Random(f"{body}"))}
    if "logprobs" not in body and rng.random() < 0.2:
        body["echo"] = True
    body["prompt"] = words if rng.random() < 0.8 else [words, words[::-1]]
    return {**body, **_draw_limits(random.Random(f"{body}"))}


def _draw_limits(rng: random.Random) -> dict[str, Any]:
    """Parameters that say which tokens may come, and what is shown of them."""
    limits: dict[str, Any] = {}
    if rng.random() < 0.2:
        limits["allowed_token_ids"] = sorted(rng.sample(range(20, 400), k=rng.choice((2, 5, 40))))
    if rng.random() < 0.2:
        limits["bad_words"] = [rng.choice("aeiou"), *rng.choices(("the", "an a", "0", "12"), k=rng.randrange(3))]
    if rng.random() < 0.2:
        limits["min_tokens"] = 1
    if rng.random() < 0.2:
        limits |= {"include_stop_str_in_output": True, "skip_special_tokens": False}
    if rng.random() < 0.1:
        limits["cache_salt"] = rng.choice(("pepper", "salt"))
    return limits


def _in_background(rng: random.Random, request: Request) -> Request:
    """The same as a response in the background, where it is a chat."""
    if "messages" not in request.body:
        return request
    body = {name: value for name, value in request.body.items() if name in KEPT}
    after_s = round(rng.expovariate(1.0), 3)
    return msgspec.structs.replace(request, body=body, behaviour="polls", after_s=after_s, for_s=0.0)


def _draw_frontend_faults(rng: random.Random, topology: Topology) -> list[Fault]:
    """While there is something to be made."""
    faults: list[Fault] = []
    for _ in range(rng.randint(1, 3)):
        at_s, name = round(rng.uniform(FIRST_REQUEST_S, LAST_REQUEST_S + 3.0), 3), rng.choice(topology.frontend_ids)
        if rng.random() < 0.6:
            faults.append(Kill(at_s, (name,), round(rng.choice((0.3, 3.0, 8.0)) * rng.uniform(0.7, 1.3), 3)))
        else:
            faults.append(Terminate(at_s, (name,), 0.0))
    return faults


def _draw_long_cut(rng: random.Random, topology: Topology) -> list[Fault]:
    """Longer than a lease and the grace after it: nobody but the store misses the worker, which is busy."""
    if rng.random() >= 0.15:
        return []
    at_s = round(rng.uniform(FIRST_FAULT_S, HEALED_S - 16.0), 3)
    worker = rng.choice(topology.worker_ids)
    return [Cut(at_s, (worker,), (STORE,), round(rng.uniform(11.0, 14.0), 3), both_ways=True)]


def _draw_fault(rng: random.Random, topology: Topology) -> Fault:
    at_s = round(rng.uniform(FIRST_FAULT_S, HEALED_S - 4.0), 3)
    for_s = round(min(rng.choice((0.3, 1.0, 3.0, 8.0, 15.0)) * rng.uniform(0.7, 1.3), HEALED_S - at_s), 3)
    names = (STORE, *topology.member_ids)
    kinds = {
        "kill": 8, "kill workers": 1, "terminate": 4, "rolling": 1, "pause": 4, "cut": 6, "isolate": 2, "slow": 2,
        "compact": 1, "wipe": 1, "delete": 2, "full disk": 1, "clock": 2,
    }  # fmt: skip
    match rng.choices(list(kinds), list(kinds.values()))[0]:
        case "kill":
            return Kill(at_s, tuple(sorted(rng.sample(names, rng.choice((1, 1, 1, 2))))), for_s)
        case "kill workers":
            return Kill(at_s, topology.worker_ids, for_s)
        case "terminate":
            return Terminate(at_s, (rng.choice(names),), 0.0)
        case "rolling":
            return Terminate(at_s, tuple(rng.sample(names, len(names))), round(rng.uniform(0.5, 2.0), 3))
        case "pause":
            return Pause(at_s, rng.choice(names), for_s)
        case "cut":
            one, other = rng.sample((*names, CLIENT), 2)
            return Cut(at_s, (one,), (other,), for_s, rng.random() < 0.6)
        case "isolate":
            one = rng.choice(names)
            others = [name for name in names if name != one]
            return Cut(at_s, (one,), tuple(sorted(rng.sample(others, rng.randint(1, len(others))))), for_s, True)
        case "slow":
            one, other = rng.sample(names, 2)
            return Slow(at_s, one, other, rng.choice((0.02, 0.1, 0.4)), for_s)
        case "compact":
            return Compact(at_s)
        case "wipe":
            return Wipe(at_s, for_s)
        case "delete":
            return DeleteKeys(at_s, rng.choice((0.1, 0.5, 1.0)), rng.getrandbits(32))
        case "full disk":
            return FullDisk(at_s, for_s)
        case _:
            return StepClock(at_s, rng.choice(names), rng.choice((-3600.0, -5.0, 5.0, 86_400.0)))


def _draw_operated_topology(rng: random.Random) -> Topology:
    supervised, cascade = rng.random() < 0.5, rng.random() < 0.6
    workers = rng.randint(1, 2) if cascade else rng.randint(2, 4)
    phases: tuple[Phase, ...] = tuple("any" for _ in range(workers))
    if len(phases) > 1 and rng.random() < 0.15:
        phases = ("prefill", "decode", *phases[2:])
    topology = Topology(
        supervised=supervised,
        frontends=rng.choice((1, 1, 2)),
        schedulers=rng.choice((1, 1, 2)),
        monitors=rng.choice((1, 1, 2)),
        planners=1 if supervised else rng.choice((1, 1, 2)),
        predictors=1 if supervised else rng.choice((0, 1)),
        routers=1 if supervised else rng.choice((1, 1, 2)) * cascade,
        phases=phases,
        large=rng.randint(1, 2) if cascade else 0,
        kv_blocks=rng.choice((4096, 4096, 160)),
        policy=rng.choice(("penstock", "lmetric", "round_robin", "arrow", "stages")),
        rescheduler=rng.choice(("off", "off", "current", "predicted")),
    )
    topology = msgspec.structs.replace(topology, instance_wait_s=rng.choice((30.0, 30.0, 30.0, 4.0)))
    return _by_trajectories(rng, topology)


def _leaves_time(fault: Fault) -> bool:
    """Whether what this does to a supervisor is over in time."""
    names = fault.names if isinstance(fault, (Kill, Terminate)) else (STORE,) if isinstance(fault, Wipe) else ()
    return STORE not in names or fault.at_s < LAST_STORE_FAULT_S


def _of_models(rng: random.Random, request: Request, topology: Topology) -> Request:
    """The same to another model, perhaps."""
    body = dict(request.body)
    if rng.random() < 0.1:
        body["logit_bias"] = {str(token_id): rng.choice((-5.0, 5.0)) for token_id in rng.sample(range(1, 200), 3)}
    if topology.large:
        body["model"] = rng.choice((MODEL, LARGE, CASCADE, CASCADE))
    if body["model"] != CASCADE:
        return msgspec.structs.replace(request, body=body)
    body["n"] = 1
    body.pop("allowed_token_ids", None)  # which a cascade refuses
    if isinstance(body.get("prompt"), list):
        body["prompt"] = body["prompt"][0]
    if rng.random() < 0.2:
        body["penstock"] = rng.choice(({"max_tier": MODEL}, {"max_tier": LARGE}, {"quality": 0.0}, {"quality": 100.0}))
    behaviour = "reads" if request.behaviour == "returns" else request.behaviour  # the rest of it cannot be had
    return msgspec.structs.replace(request, body=body, behaviour=behaviour)


def _with_adapters(rng: random.Random, topology: Topology, requests: list[Request]) -> tuple[Topology, list[Request]]:
    """Some meshes serve LoRA adapters, and half of their requests for the first model are for one of them."""
    if topology.supervised or rng.random() >= ADAPTERS_SHARE:
        return topology, requests
    asked = []
    for request in requests:
        draw = random.Random(f"{rng.random()}")
        is_moved = request.body["model"] == MODEL and draw.random() < 0.5
        body = {**request.body, "model": draw.choice(ADAPTERS)} if is_moved else request.body
        asked.append(msgspec.structs.replace(request, body=body))
    return msgspec.structs.replace(topology, has_adapters=True), asked


def _with_prefixes(rng: random.Random, requests: list[Request]) -> list[Request]:
    """Half of the prompts begin with one of two long texts: instances pull them from each other."""
    texts = [f"{name}: {PREFIX * rng.choice((8, 14, 22))}" for name in ("First", "Second")]
    return [_begun_with(rng.choice(texts), request) if rng.random() < 0.5 else request for request in requests]


def _draw_pull_faults(rng: random.Random, topology: Topology, requests: list[Request]) -> list[Fault]:
    """Two workers out of order for a while, at moments when a prefix may be on its way."""
    faults: list[Fault] = []
    late = [request.at_s for request in requests if request.at_s > FIRST_FAULT_S]
    for at_s in rng.sample(late, min(2, len(late))):
        worker, for_s = rng.choice(topology.worker_ids), round(rng.uniform(0.3, 3.0), 3)
        struck_s = round(at_s + rng.uniform(0.002, 0.05), 4)
        others = tuple(name for name in topology.worker_ids if name != worker)
        cut: list[Fault] = [Cut(struck_s, (worker,), others, for_s, both_ways=True)] if others else []
        faults += rng.choice(([Kill(struck_s, (worker,), for_s)], [Pause(struck_s, worker, for_s)], cut))
    return faults


def _begun_with(text: str, request: Request) -> Request:
    body = dict(request.body)
    if "messages" in body:
        body["messages"] = [{**body["messages"][0], "content": text + body["messages"][0]["content"]}]
    elif isinstance(body["prompt"], str):
        body["prompt"] = text + body["prompt"]
    return msgspec.structs.replace(request, body=body)


def _with_host(rng: random.Random, topology: Topology) -> tuple[Topology, list[Fault]]:
    """Some meshes keep KV in the memory of a host, which may change what it holds."""
    if rng.random() >= HOST_SHARE:
        return topology, []
    topology = msgspec.structs.replace(topology, host_kv_blocks=rng.choice((12, 60, 400, 400)))
    at_s, share, seed = round(rng.uniform(FIRST_FAULT_S, HEALED_S), 3), rng.choice((0.1, 0.5, 1.0)), rng.getrandbits(32)
    return topology, [ChangeBlocks(at_s, share, seed)] if rng.random() < 0.5 else []


def _with_host_disk(rng: random.Random, topology: Topology) -> tuple[Topology, list[Fault]]:
    """Some of them keep it on the host's disk, too, and more than its memory, and have trouble with it."""
    if not topology.host_kv_blocks or rng.random() >= HOST_DISK_SHARE:
        return topology, []
    topology = msgspec.structs.replace(topology, disk_kv_blocks=rng.choice((20, 120, 1000, 1000)))
    faults: list[Fault] = []
    for _ in range(rng.randint(0, 2)):
        at_s = round(rng.uniform(FIRST_FAULT_S, HEALED_S - 4.0), 3)
        for_s = round(rng.uniform(0.3, 4.0), 3)
        faults.append(rng.choice((FullHostDisk, KillInWrite, LosePower, LosePower))(at_s, for_s))
    return topology, faults


def _draw_broken_engine(rng: random.Random, topology: Topology) -> list[Fault]:
    if rng.random() >= 0.2:
        return []
    at_s = round(rng.uniform(FIRST_FAULT_S, HEALED_S - 6.0), 3)
    return [BreakEngine(at_s, rng.choice(topology.worker_ids), round(rng.uniform(2.0, 6.0), 3))]


def _draw_operation(rng: random.Random, topology: Topology) -> Operation:
    return Operation(round(rng.uniform(FIRST_FAULT_S, HEALED_S - 4.0), 3), _draw_action(rng, topology))


def _draw_action(rng: random.Random, topology: Topology) -> OperatorAction:
    kinds = {
        "migrate": 6, "drain": 3, "restart": 4, "rolling": 1, "policy": 2, "rescheduler": 2, "stages": 2,
        "plan stages": 1, "cascade": 2 if topology.large else 0, "plan": 2 if topology.large else 0,
    }  # fmt: skip
    worker = rng.choice(topology.worker_ids)
    match rng.choices(list(kinds), list(kinds.values()))[0]:
        case "migrate":
            return Migrate(rng.randrange(100), worker, rng.random() < 0.3)
        case "drain":
            return Drain(worker, round(rng.uniform(0.0, 3.0), 3))
        case "restart":
            role, names = rng.choice(
                (
                    ("worker", topology.worker_ids),
                    ("scheduler", topology.scheduler_ids),
                    ("monitor", topology.monitor_ids),
                    ("frontend", topology.frontend_ids),
                    ("planner", topology.planner_ids),
                )
            )
            return Restart(rng.choice(names), role, rng.choice((None, None, 0.0, 2.0)))
        case "rolling":
            return RollingRestart(rng.choice((None, "worker", "scheduler")), rng.choice((None, 1.0)))
        case "policy":
            return SwitchPolicy(rng.choice(("lmetric", "round_robin", "arrow", "stages", "least_loaded", "penstock")))
        case "rescheduler":
            made = SwitchRescheduler(
                rng.choice(("off", "current", "predicted", "trajectories")), (("interval_s", 0.2),)
            )
            if made.mode != "trajectories":
                return made
            eager = (("floor_ms", 0.0), ("migration_fixed_ms", 1.0))  # answers are short here
            return msgspec.structs.replace(made, parameters=made.parameters + eager)
        case "stages":
            return SwitchStages(rng.random() < 0.7, rng.choice((0, 5)))
        case "plan stages":
            return PlanStages()
        case "cascade":
            judges = rng.choice((("confidence",), ("confidence",), (f"model:{LARGE}", "confidence")))
            threshold = rng.choice((0.0, 60.0, 75.0, 101.0))
            # Not drawn, so that nothing else of a seed moves.
            return SetCascade(CASCADE, (MODEL, LARGE), (threshold,), judges, speculate=0.2 if threshold > 60 else 0.0)
        case _:
            counts = (MODEL, rng.randint(1, 3)), (LARGE, rng.randint(1, 3))
            return ApplyPlan(CASCADE, counts, (rng.choice((60.0, 75.0)),))

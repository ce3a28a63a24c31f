"""A `PenstockModel` as users write it, and the pods that it asks for (pure)."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from controlplane.deployment.replicas import Shape, cores_of, gpus_of, shape_of, shaped
from controlplane.model.replica_kind import MAX_REPLICAS

GROUP: Final = "penstock.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "PenstockModel"
PLURAL: Final = "penstockmodels"
FINALIZER: Final = f"{GROUP}/drain"
"""Keeps a resource that is being deleted until its instances have drained."""
OWNER_LABEL: Final = f"{GROUP}/penstockmodel"
"""Of pods: the name of their resource."""
INSTANCE_ANNOTATION: Final = f"{GROUP}/instance"
"""Of pods: the member id of their worker."""
SHAPE_ANNOTATION: Final = f"{GROUP}/shape"
"""Of pods: the shape of their engine, as TPxPP."""
WORKER: Final = "worker"
"""Name of the container that the worker runs in; where none is called so it is the first."""
GPUS: Final = "nvidia.com/gpu"
_ENGINE_ARG: Final = "--engine-arg"
MAX_NAME: Final = 58
"""Characters of a resource's name, so that those of its pods are names of hosts, too."""


@dataclass(frozen=True, slots=True)
class ModelResource:
    """One model of the mesh, and how its instances are run."""

    name: str
    uid: str
    version: str
    """Of the whole object; another one with every change of it."""
    generation: int
    """Of what users write."""
    model: str
    """What clients call it."""
    replicas: int
    template: Mapping[str, Any]
    """Metadata and spec of a pod with a worker; treated as immutable."""
    finalizers: tuple[str, ...]
    is_leaving: bool
    """Whether somebody has deleted it."""
    status: Mapping[str, Any]

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> "ModelResource":
        """As the API server shows it."""
        metadata, spec = written["metadata"], written.get("spec") or {}
        name = str(metadata["name"])
        return cls(
            name=name,
            uid=str(metadata["uid"]),
            version=str(metadata["resourceVersion"]),
            generation=int(metadata.get("generation", 0)),
            model=str(spec.get("model") or name),
            replicas=int(spec.get("replicas", 1)),
            template=spec.get("template") or {},
            finalizers=tuple(metadata.get("finalizers") or ()),
            is_leaving=bool(metadata.get("deletionTimestamp")),
            status=written.get("status") or {},
        )

    @property
    def problem(self) -> str:
        """Why no pod can be made of it; empty: one can."""
        if not 0 <= self.replicas <= MAX_REPLICAS:
            return f"spec.replicas {self.replicas}: 0 to {MAX_REPLICAS} are possible"
        if len(self.name) > MAX_NAME:
            return f"metadata.name has {len(self.name)} characters; {MAX_NAME} are possible"
        if not (self.template.get("spec") or {}).get("containers"):
            return "spec.template.spec.containers is empty: give a container that serves a worker"
        return ""

    @property
    def engine_args(self) -> tuple[str, ...]:
        """NAME=VALUE, as the worker's arguments have them."""
        return _engine_args(_worker(self.template["spec"]).get("args") or ())

    @property
    def shape(self) -> Shape:
        """Of an instance, where no plan wants another."""
        return shape_of(self.engine_args)

    @property
    def selector(self) -> str:
        """By which the pods are found."""
        return f"{OWNER_LABEL}={self.name}"

    def pod_name(self, instance: str) -> str:
        """Instances of a model are numbered, and so are its pods: no two leaders can start the same one twice."""
        return f"{self.name}-{instance.rpartition('-')[2]}"

    def pod(self, instance: str, shape: Shape) -> dict[str, Any]:
        """The pod of one instance. It is never started again in its place: who ended why decides what comes next."""
        spec = copy.deepcopy(dict(self.template["spec"]))
        worker = _worker(spec)
        given = list(worker.get("args") or ())
        if shape != self.shape:
            engine_args = shaped(self.engine_args, shape)
            given = [*_without_engine_args(given), *(f"{_ENGINE_ARG}={each}" for each in engine_args)]
            for amounts in (worker.get("resources") or {}).values():
                if GPUS in amounts:
                    amounts[GPUS] = str(gpus_of(shape) * cores_of(engine_args))
        worker["args"] = [*given, f"--member-id={instance}"]
        worker.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
        spec["restartPolicy"] = "Never"
        asked = self.template.get("metadata") or {}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.pod_name(instance),
                "labels": {**(asked.get("labels") or {}), OWNER_LABEL: self.name},
                "annotations": {
                    **(asked.get("annotations") or {}),
                    INSTANCE_ANNOTATION: instance,
                    SHAPE_ANNOTATION: f"{shape[0]}x{shape[1]}",
                },
                "ownerReferences": [
                    {
                        "apiVersion": API_VERSION,
                        "kind": KIND,
                        "name": self.name,
                        "uid": self.uid,
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": spec,
        }


def by_model(resources: Iterable[ModelResource]) -> tuple[dict[str, ModelResource], dict[str, str]]:
    """Who runs each model; and, by the names of the others, why they do not. Of several that name one model, the first
    by name runs it, once none is left that is being deleted; such are in neither."""
    holders: dict[str, ModelResource] = {}
    refused: dict[str, str] = {}
    for each in sorted(resources, key=lambda resource: (not resource.is_leaving, resource.name)):
        if each.problem and not each.is_leaving:
            refused[each.name] = each.problem
        elif (other := holders.setdefault(each.model, each)) is not each and not each.is_leaving:
            refused[each.name] = f"{other.name} runs the model {each.model} already: name another in spec.model"
    return {model: each for model, each in holders.items() if not each.is_leaving}, refused


def _worker(spec: Mapping[str, Any]) -> dict[str, Any]:
    containers: list[dict[str, Any]] = spec["containers"]
    return next((each for each in containers if each.get("name") == WORKER), containers[0])


def _engine_args(arguments: Sequence[str]) -> tuple[str, ...]:
    """In both ways of writing: `--engine-arg=NAME=VALUE` and `--engine-arg NAME=VALUE`."""
    found: list[str] = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if argument.startswith(f"{_ENGINE_ARG}="):
            found.append(argument.removeprefix(f"{_ENGINE_ARG}="))
        elif before == _ENGINE_ARG:
            found.append(argument)
    return tuple(found)


def _without_engine_args(arguments: Sequence[str]) -> list[str]:
    return [
        argument
        for before, argument in zip(("", *arguments), arguments, strict=False)
        if not (argument == _ENGINE_ARG or argument.startswith(f"{_ENGINE_ARG}=") or before == _ENGINE_ARG)
    ]

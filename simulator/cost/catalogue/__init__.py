"""Which model on which device: sizes and costs from public configurations and datasheets."""

from simulator.cost.catalogue.deployment import Deployment, deployment_for, instance_for
from simulator.cost.catalogue.devices import DEVICES
from simulator.cost.catalogue.models import MODELS
from simulator.cost.spec.device import DeviceSpec
from simulator.cost.spec.model import ModelSpec

__all__ = ["DEVICES", "MODELS", "Deployment", "DeviceSpec", "ModelSpec", "deployment_for", "instance_for"]

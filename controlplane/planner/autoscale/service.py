"""The gRPC methods of `penstock.v1.Autoscaler`."""

from typing import Any

import grpc
import msgspec

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.planner.autoscale.driver import AutoscaleDriver
from mesh.errors import ConfigurationError, StoreError
from penstock.v1 import autoscale_pb2, autoscale_pb2_grpc


class AutoscalerService(autoscale_pb2_grpc.AutoscalerServicer):
    """Takes policies, and shows what was decided by them."""

    def __init__(self, driver: AutoscaleDriver) -> None:
        self._driver = driver

    async def ListScaled(
        self, request: autoscale_pb2.ListScaledRequest, context: Any
    ) -> autoscale_pb2.ListScaledResponse:
        """See the contract."""
        response = autoscale_pb2.ListScaledResponse()
        for model, policy in sorted(self._driver.policies.items()):
            status = self._driver.status(model)
            response.models.add(
                model=model,
                policy_json=msgspec.json.encode(policy).decode(),
                status_json="" if status is None else msgspec.json.encode(status).decode(),
            )
        return response

    async def SetAutoscale(
        self, request: autoscale_pb2.SetAutoscaleRequest, context: Any
    ) -> autoscale_pb2.SetAutoscaleResponse:
        """See the contract."""
        try:
            policy = msgspec.json.decode(request.policy_json, type=AutoscalePolicy)
            revision = await self._driver.set_policy(policy)
        except (msgspec.MsgspecError, ConfigurationError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no autoscale policy: {error}")
            raise AssertionError("abort raises") from None
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise AssertionError("abort raises") from None
        return autoscale_pb2.SetAutoscaleResponse(revision=revision)

    async def RemoveAutoscale(
        self, request: autoscale_pb2.RemoveAutoscaleRequest, context: Any
    ) -> autoscale_pb2.RemoveAutoscaleResponse:
        """See the contract."""
        try:
            return autoscale_pb2.RemoveAutoscaleResponse(removed=await self._driver.remove_policy(request.model))
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise AssertionError("abort raises") from None

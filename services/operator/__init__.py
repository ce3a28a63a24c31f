"""The operator: runs a mesh's plans as pods of a Kubernetes cluster.

What is to run is decided by `controlplane.deployment` as on one machine; a pod that ends is started again by the same
`Supervisor`. Here is what is Kubernetes' own: `model_resource` reads what users write, `followed_objects` keeps up with
the API server, `pod_launcher` and `pod_actuator` carry instances out, `model_operator` puts them together.
"""

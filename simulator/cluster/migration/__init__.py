"""Requests that move between modelled instances, as `controlplane/protocols/migration` decides.

`coordinator` carries out what the managers of one instance say; `migrations` connects those of a cluster. They are what
`engine_worker/coordinator` is in the live mesh.
"""

"""What `penstock up` runs its instances on where they are no processes of its own.

Each carrier is a `services.cli.supervisor.launcher.Launcher`: the same supervisor keeps what it starts running, by the
same `RestartManager`, and the same `Deployer` has it start and end instances.
"""

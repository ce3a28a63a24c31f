"""The deployment of planned instances where a supervisor starts them: what to start and to end next, and what to say.

`manager` takes in plans and looks at the processes, and says what is to be done; `steps` chooses the next steps from
the whole `Situation`, by each model's `tier_status`; `failed_starts` and `restarts` say when something is tried again,
`deployment_status` what is missing and why; `gpus` hands out the machine's GPUs. All of it is pure: the processes are
started in `services/cli/supervisor`.
"""

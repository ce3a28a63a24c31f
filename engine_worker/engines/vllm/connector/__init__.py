"""vLLM's KV connector of the mesh: how requests' KV gets in and out of stock vLLM.

    worker process                      engine core process
    exports, imports --- channel ---> bridge (own thread: KV transfer agent, control socket)
                                       |  inbox, shared tables     ^ loads
                                      scheduler_side --- orders ---> worker_side
                                      (both called by vLLM's engine loop, between and within steps)

Where a model is spread over several ranks, the worker side is in each rank's process, and so is the agent:

    engine core process                               each rank's process
    bridge (`ranks`: the agents as one) --- socket ---> rank_bridge (own thread: KV transfer agent)
    scheduler_side --- orders, by vLLM's broadcast ---> worker_side

`messages` is what the two processes say to each other, `orders` what the scheduler side tells the worker side with
each step. Without a migration a step costs a look at two empty containers.
"""

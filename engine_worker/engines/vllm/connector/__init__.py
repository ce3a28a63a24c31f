"""vLLM's KV connector of the mesh: how requests' KV gets in and out of stock vLLM.

    worker process                      engine core process
    exports, imports --- channel ---> bridge (own thread: KV transfer agent, control socket)
                                       |  inbox, shared tables     ^ loads
                                      scheduler_side --- orders ---> worker_side
                                      (both called by vLLM's engine loop, between and within steps)

`messages` is what the two processes say to each other, `orders` what the scheduler side tells the worker side with
each step. Without a migration a step costs a look at two empty containers.
"""

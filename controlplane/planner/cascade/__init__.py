"""Cascade plans: made when the workload has moved, stored, and followed by everyone (Cascadia, section 4.4).

routers       adds up what the mesh's cascade routers report (pure)
history       what was last seen of one cascade's workload, and whether it has moved (pure)
plan_case     what a plan is made for, tiers without instances included (pure)
report        what one cascade router tells
stored        records, goals and plans in the state store; applying a plan
plan_process  makes plans in a process of their own, within a deadline
manager          takes workloads, has plans made, applies them
wire          goals and plans between Python and protobuf
"""

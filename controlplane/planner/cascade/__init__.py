"""Cascade plans: made when the workload has moved, stored, and followed by everyone (Cascadia, section 4.4).

history    what was last seen of one cascade's workload, and whether it has moved (pure)
desk       takes workloads, has plans made, applies them
wire       goals and plans between Python and protobuf
"""

"""What the papers claim, measured again with the mesh's own policies on the simulated mesh.

A paper is one module with a function `reproduce(run) -> Findings` and a line in `registry.py`; everything around it
(processes, progress, report, page) is here once.
"""

"""The length predictor (STAR, section 4): datasets, training, evaluation, artefacts and the role that serves them."""

import os

# A batch takes a thread less than a millisecond; more threads would spin for much longer than that, on cores that the
# engines need. Read when NumPy is first imported, so this stands before anything here imports it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

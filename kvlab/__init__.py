"""kvlab: the engine and the planner under The KV Cache Lab. Importing it imports nothing heavy."""

import os

__version__ = "0.1.0"

# A step is many short parallel regions. OpenMP's threads by default spin between them, and on a machine with
# another busy process each region then waits for a whole time slice: a step took eight times as long here. Read when
# OpenMP starts, so it takes effect where kvlab is imported before torch; the Makefile sets it for JupyterLab.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

"""The tiny models of the engine's tests, for tests of speculation."""

import sys
from pathlib import Path

# one tiny random model of every kind, in fp64, is beside the engine's tests
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

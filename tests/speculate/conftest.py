"""The tiny models of the engine's tests, for tests of speculation."""

import importlib.util
import sys
from pathlib import Path

# one tiny random model of every kind, in fp64, is beside the engine's tests
ENGINE = Path(__file__).parents[1] / "engine"
sys.path.insert(0, str(ENGINE))
if "conftest_engine" not in sys.modules:
    found = importlib.util.spec_from_file_location("conftest_engine", ENGINE / "conftest.py")
    sys.modules["conftest_engine"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(sys.modules["conftest_engine"])

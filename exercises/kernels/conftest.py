"""Puzzles run in Triton's interpreter, which has to be chosen before triton is first imported."""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

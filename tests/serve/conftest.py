"""What tests of the server stand on: the tiny model of `speaking` as a directory, a server over it, and its client."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from kvlab.serve.limits import ServerLimits
from kvlab.serve.server import ServerThread

sys.path.insert(0, str(Path(__file__).parent))

import speaking
from calling import client_of


@pytest.fixture(autouse=True)
def plain_operations(monkeypatch):
    monkeypatch.setenv("KVLAB_OPS", "reference")


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(speaking.CONFIG))
    save_file({name: tensor.float() for name, tensor in speaking.state().items()}, str(tmp_path / "model.safetensors"))
    return tmp_path


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_OPS", "reference")
        with ServerThread(speaking.engine(), ServerLimits(max_body_bytes=20_000, drain_s=5)) as thread:
            yield thread


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)

"""`kvlab parity`: exit 0 for parity, 1 for none, 2 for what the engine cannot run."""

import json

import pytest

from kvlab.cli import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 999,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
        return str(tmp_path)

    return write


def test_parity_holds(config, capsys):
    assert main(["parity", config(), "--seed", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model_type"], report["seed"], report["passed"], report["kept_layers"]) == ("llama", 5, True, [0, 1])
    assert 0 <= report["max_error"] <= report["tolerance"] == 1e-4
    assert {"field": "num_hidden_layers", "old": 6, "new": 2} in report["changes"]


def test_the_text_shows_what_was_shrunk(config, capsys):
    assert main(["parity", config()]) == 0
    text = capsys.readouterr().out
    assert "num_hidden_layers" in text and "6 -> 2" in text and text.rstrip().endswith("parity holds")


def test_how_a_published_checkpoint_is_stored_is_no_reason_to_refuse_its_family(config, capsys):
    stored = config(quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert main(["parity", stored]) == 0
    assert capsys.readouterr().out.rstrip().endswith("parity holds")


def test_a_wrong_decoder_fails(config, capsys, monkeypatch):
    from kvlab.lab import parity

    load = parity.from_state_dict

    def slightly_wrong(hf_config, state):
        model = load(hf_config, state)
        label = "Attention.scale + 10 %"
        (wrong,) = (mutant for name, mutant in parity.mutate.mutants(model.config, dict(state)) if name == label)
        return parity.mutate.mutated(model, wrong)

    monkeypatch.setattr(parity, "from_state_dict", slightly_wrong)
    assert main(["parity", config()]) == 1
    assert capsys.readouterr().out.rstrip().endswith("parity FAILS")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "xverse"}, "model_type 'xverse': the engine runs"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
    ],
)
def test_unsupported_is_one_line_and_exit_code_2(config, capsys, changes, reason):
    assert main(["parity", config(**changes)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvlab: {reason}") and error.count("\n") == 1


def test_no_such_file(capsys, tmp_path):
    assert main(["parity", str(tmp_path / "nothing.json")]) == 2
    assert capsys.readouterr().err.startswith("kvlab: ")

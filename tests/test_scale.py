"""Scales: the shipped files agree on their keys, and a faulty one is refused in one line that helps."""

import pytest
import yaml

from artifact.study import paths, scale

TINY = """name: tiny
seed: 0
sweep_requests: 40
sweep_seeds: 2
settle_requests: 64
block_tokens: [16, 128]
prompt_tokens: [512]
run_length_requests: [20]
trace_requests: 50
sample_requests: 20
controller_runs: 60
controller_commands: 2000
prediction_prompts: 2
prediction_layers: 2
compiled_cases: 1
kernel_tokens: 4096
kernel_rounds: 2
fidelity_prompt_tokens: 1024
fidelity_tokens: 0
fidelity_passages: 1
fidelity_needle_tokens: 1024
fidelity_needles: 0
runtime_tokens: [8192]
runtime_models: 1
runtime_layers: 2
runtime_rounds: 0
"""


def test_shipped_scales_are_valid_and_have_the_same_keys():
    assert scale.names() == ["tiny", "smoke", "full"]
    loaded = [scale.load(name) for name in scale.names()]
    assert [one.sweep_requests for one in loaded] == sorted(one.sweep_requests for one in loaded)
    files = [yaml.safe_load((paths.data_dir() / "scales" / f"{name}.yml").read_text()) for name in scale.names()]
    assert all(list(content) == list(files[0]) for content in files)


@pytest.mark.parametrize(("text", "says"), [
    (TINY + "sweep_request: 3\n", "unknown key 'sweep_request'; allowed: name, seed, sweep_requests"),
    (TINY.replace("seed: 0\n", ""), "key 'seed' is missing"),
    (TINY.replace("seed: 0", "sed: 0"), "unknown key 'sed'"),
    (TINY.replace("seed: 0", "seed: '0'"), "seed is '0'; it must be a valid integer"),
    (TINY.replace("seed: 0", "seed: true"), "seed is True"),
    (TINY.replace("seed: 0", "seed: -1"), "seed is -1; it must be greater than or equal to 0"),
    (TINY.replace("[512]", "512"), "prompt_tokens is 512; it must be a list"),
    (TINY.replace("[512]", "[]"), "it must be a list with something in it"),
    (TINY.replace("[512]", "[512, 0]"), "prompt_tokens.1 is 0; it must be greater than 0"),
    (TINY.replace("[512]", "[512, 1.5]"), "prompt_tokens.1 is 1.5"),
    (TINY.replace("[512]", "[512"), "line 8: not YAML"),
    (TINY.replace("tiny", "small"), "name is 'small'; it must be the file's, 'tiny'"),
    ("", "must be a mapping"),
    ("- 1", "must be a mapping"),
    ("name: !!python/object/apply:os.system ['true']", "not YAML"),
])
def test_a_faulty_scale_file_is_one_line(tmp_path, text, says):
    (tmp_path / "tiny.yml").write_text(text)
    with pytest.raises(ValueError) as caught:
        scale.load("tiny", tmp_path)
    assert says in str(caught.value) and "tiny.yml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["huge", "", "../tiny", "tiny.yml"])
def test_an_unknown_scale_is_refused_with_what_is_allowed(name):
    with pytest.raises(ValueError, match="is not one of: tiny, smoke, full"):
        scale.load(name)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "tiny.yml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match=r"tiny\.yml: not UTF-8"):
        scale.load("tiny", tmp_path)


def test_a_scale_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        scale.load("tiny").seed = 1

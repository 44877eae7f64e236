"""Geometry: derived sizes, a source for every number, and what is refused."""

import pytest

from artifact.pim import geometry


@pytest.mark.parametrize("table", [geometry.DRAM_TABLE, geometry.SHAPE_TABLE])
def test_every_number_has_a_source(table):
    for name, rows in table.items():
        for key, (value, source) in rows.items():
            assert isinstance(value, (int, float)), (name, key)
            assert len(source) > 10, (name, key)


def test_the_studys_hbm3():
    memory = geometry.dram("hbm3-pim")
    assert (memory.banks, memory.columns, memory.rowgroup_bytes) == (16, 32, 16 * 1024)
    assert memory.region_bytes == 512 * 1024
    assert memory.bursts == 2**28 and memory.capacity_bytes == 8 * 2**30
    assert memory.ideal_gbps == pytest.approx(3810.2, abs=0.05)
    other = geometry.dram("gddr6-pim")
    assert (other.region_bytes, other.bursts) == (256 * 1024, 2**27)


@pytest.mark.parametrize(
    ("model", "token_bytes", "tokens", "blocks"),
    [("llama-gqa-8kv", 4096, 128, 8), ("mqa-1kv", 512, 1024, 64), ("mha-32kv", 16384, 32, 2)],
)
def test_derived_block_and_region(model, token_bytes, tokens, blocks):
    memory, shape = geometry.dram("hbm3-pim"), geometry.shape(model)
    assert shape.kv_bytes_per_token == token_bytes
    assert geometry.derived_block_tokens(memory, token_bytes) == tokens
    assert geometry.blocks_per_region(memory, token_bytes, 16) == blocks
    assert geometry.blocks_per_region(memory, token_bytes, tokens) == 1


@pytest.mark.parametrize(
    ("block_tokens", "expected"), [(4, 32), (8, 16), (16, 8), (32, 4), (64, 2), (128, 1), (256, 1)]
)
def test_blocks_per_region_by_size(block_tokens, expected):
    assert geometry.blocks_per_region(geometry.dram("hbm3-pim"), 4096, block_tokens) == expected


@pytest.mark.parametrize("block_tokens", [24, 48, 96, 384, 0, -16, 1.5, True])
def test_a_block_that_does_not_divide_a_region_is_refused(block_tokens):
    with pytest.raises(ValueError, match="block_tokens is"):
        geometry.blocks_per_region(geometry.dram("hbm3-pim"), 4096, block_tokens)


def test_shards_divide_channels_and_heads():
    assert geometry.dram("hbm3-pim").shard(8).channels == 4
    assert geometry.shape("llama-gqa-8kv").shard(8).kv_heads == 1
    for refuse in (geometry.dram("hbm3-pim"), geometry.shape("llama-gqa-8kv")):
        with pytest.raises(ValueError, match="kv_shards is 3"):
            refuse.shard(3)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"channels": 30}, "channels is 30"),
        ({"rows": 0}, "rows is 0"),
        ({"row_bytes": 16}, "row_bytes is 16"),
        ({"cacheline_bytes": 2048}, "cacheline_bytes is 2048"),
        ({"trc_ns": float("nan")}, "trc_ns is nan"),
        ({"tccd_ab_ns": -1}, "tccd_ab_ns is -1"),
        ({"trc_ns": "45"}, "trc_ns is '45'"),
        ({"speed": 1}, "unknown key 'speed'"),
    ],
)
def test_a_wrong_device_is_refused(change, complaint):
    right = {key: value for key, (value, _) in geometry.DRAM_TABLE["hbm3-pim"].items()}
    assert geometry.Dram.from_mapping(right, "mine").channels == 32
    with pytest.raises(ValueError, match=complaint):
        geometry.Dram.from_mapping(right | change, "mine")


def test_missing_keys_and_unknown_names():
    with pytest.raises(ValueError, match="missing key 'channels'"):
        geometry.Dram.from_mapping({}, "mine")
    with pytest.raises(ValueError, match="expected a mapping"):
        geometry.Shape.from_mapping([1, 2], "mine")
    with pytest.raises(ValueError, match="unknown dram 'hbm9'; allowed: hbm3-pim, gddr6-pim"):
        geometry.dram("hbm9")

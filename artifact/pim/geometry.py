"""What the memory and the model look like: tables of numbers, each with its source.

The presets reproduce the study (KV-PIMple, `config.py` at commit eb56d6d). A user's own device or model is a
mapping with the same keys (`Dram.from_mapping`, `Shape.from_mapping`); the command line reads it from YAML.
"""

from dataclasses import dataclass, fields

_STUDY = "KV-PIMple config.py, commit eb56d6d"
_HBM3 = "HBM3: 16 channels of two 32-bit pseudo-channels; " + _STUDY
_TIMING = _STUDY + ": AttAcc / Ramulator 2 put nRC at 10 to 11 nCCDAB for decode GEMV; no preset is named"
_GDDR6_TIMING = _TIMING + " (HBM3's numbers, used by the study for GDDR6 too)"
_ORG = "Ramulator 2 src/dram/impl/GDDR6.cpp (commit 525d045), GDDR6_8Gb_x16: 2 channels, 4 x 4 banks, rows of 2 KiB"
_AIM = "SK hynix AiM, JSSC 58(1) 2023: 1.25 V, 1 TFLOPS = 2 channels x 16 banks x 16 lanes x 2 x 1 GHz: a MAC a ns"

# name -> key -> (value, source)
DRAM_TABLE = {
    "hbm3-pim": {
        "channels": (32, _HBM3 + ": each pseudo-channel is one all-bank domain"),
        "bank_groups": (4, _STUDY),
        "banks_per_group": (4, _STUDY),
        "row_bytes": (1024, _STUDY + ": one bank's row in one pseudo-channel"),
        "burst_bytes": (32, "32-bit pseudo-channel x burst length 8; " + _STUDY),
        "rows": (16384, _STUDY),
        "cacheline_bytes": (64, "host cacheline; " + _STUDY),
        "tccd_ab_ns": (4.3, _TIMING),
        "trc_ns": (45.0, _TIMING),
    },
    "gddr6-pim": {
        "channels": (8, _STUDY),
        "bank_groups": (4, _STUDY),
        "banks_per_group": (4, _STUDY),
        "row_bytes": (2048, _STUDY),
        "burst_bytes": (32, "x16 channel x burst length 16; " + _STUDY),
        "rows": (16384, _STUDY),
        "cacheline_bytes": (64, "host cacheline; " + _STUDY),
        "tccd_ab_ns": (4.3, _GDDR6_TIMING),
        "trc_ns": (45.0, _GDDR6_TIMING),
    },
    "gddr6-aim": {
        "channels": (8, "four chips of two channels, the size of the study's GDDR6; " + _ORG),
        "bank_groups": (4, _ORG),
        "banks_per_group": (4, _ORG),
        "row_bytes": (2048, _ORG),
        "burst_bytes": (32, "x16 channel x burst length 16: 16 lanes of two bytes; " + _AIM),
        "rows": (16384, _ORG),
        "cacheline_bytes": (64, "host cacheline; " + _STUDY),
        "tccd_ab_ns": (1.0, _AIM),
        "trc_ns": (50.73, "nRC 89 x 570 ps of GDDR6_2000_1250mV_double, the preset of AiM's voltage; same file"),
    },
}

SHAPE_TABLE = {
    "llama-gqa-8kv": {
        "kv_heads": (8, "Llama-3-8B config.json: num_key_value_heads; " + _STUDY),
        "head_dim": (128, "Llama-3-8B config.json: hidden_size / num_attention_heads; " + _STUDY),
        "element_bytes": (2, "fp16; " + _STUDY),
        "layers": (32, "Llama-3-8B config.json: num_hidden_layers; " + _STUDY),
    },
    "mqa-1kv": {
        "kv_heads": (1, _STUDY + ": multi-query extreme"),
        "head_dim": (128, _STUDY),
        "element_bytes": (2, "fp16; " + _STUDY),
        "layers": (32, _STUDY),
    },
    "mha-32kv": {
        "kv_heads": (32, _STUDY + ": multi-head extreme"),
        "head_dim": (128, _STUDY),
        "element_bytes": (2, "fp16; " + _STUDY),
        "layers": (32, _STUDY),
    },
}


def _integer(name, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; allowed: a whole number of at least 1")


def _power_of_two(name, value):
    _integer(name, value)
    if value & (value - 1):
        raise ValueError(f"{name} is {value}; allowed: a power of two")


def _from_mapping(kind, mapping, name):
    """Build `kind` from a mapping of its fields; a value may be a number or a (value, source) pair."""
    wanted = [f.name for f in fields(kind) if f.name != "name"]
    if not isinstance(mapping, dict):
        raise ValueError(f"{name}: expected a mapping with the keys {', '.join(wanted)}")
    given = {k: v for k, v in mapping.items() if k != "name"}
    for key in given:
        if key not in wanted:
            raise ValueError(f"{name}: unknown key {key!r}; allowed: {', '.join(wanted)}")
    for key in wanted:
        if key not in given:
            raise ValueError(f"{name}: missing key {key!r}; needed: {', '.join(wanted)}")
    return kind(name=name, **{k: v[0] if isinstance(v, (list, tuple)) and v else v for k, v in given.items()})


@dataclass(frozen=True)
class Dram:
    """One PIM-capable memory: geometry in bytes and counts, timing in nanoseconds.

    A *region* is one row index across all banks and channels. Raises ValueError for a size that is no power of
    two, a row or cacheline that is not a multiple of the burst, or a time that is not positive.
    """

    name: str
    channels: int
    bank_groups: int
    banks_per_group: int
    row_bytes: int
    burst_bytes: int
    rows: int
    cacheline_bytes: int
    tccd_ab_ns: float
    trc_ns: float

    def __post_init__(self):
        for key in (
            "channels",
            "bank_groups",
            "banks_per_group",
            "row_bytes",
            "burst_bytes",
            "rows",
            "cacheline_bytes",
        ):
            _power_of_two(f"{self.name}: {key}", getattr(self, key))
        for key in ("row_bytes", "cacheline_bytes"):
            if getattr(self, key) < self.burst_bytes:
                raise ValueError(
                    f"{self.name}: {key} is {getattr(self, key)}; allowed: at least burst_bytes ({self.burst_bytes})"
                )
        if self.cacheline_bytes > self.row_bytes:
            raise ValueError(
                f"{self.name}: cacheline_bytes is {self.cacheline_bytes}; allowed: at most row_bytes ({self.row_bytes})"
            )
        for key in ("tccd_ab_ns", "trc_ns"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ValueError(f"{self.name}: {key} is {value!r}; allowed: a positive number of nanoseconds")

    @classmethod
    def from_mapping(cls, mapping, name):
        """A device from a mapping of this class's fields; see `DRAM_TABLE` for two."""
        return _from_mapping(cls, mapping, name)

    @property
    def banks(self):
        """Banks of one channel."""
        return self.bank_groups * self.banks_per_group

    @property
    def columns(self):
        """Bursts of one row of one bank."""
        return self.row_bytes // self.burst_bytes

    @property
    def rowgroup_bytes(self):
        """Bytes of one row index across all banks of one channel."""
        return self.row_bytes * self.banks

    @property
    def region_bytes(self):
        """Bytes of one row index across all banks and channels."""
        return self.rowgroup_bytes * self.channels

    @property
    def bursts(self):
        """Bursts of the whole memory."""
        return self.channels * self.banks * self.rows * self.columns

    @property
    def capacity_bytes(self):
        return self.bursts * self.burst_bytes

    @property
    def ideal_gbps(self):
        """Bandwidth when every command hits and uses every bank, GB/s."""
        return self.channels * self.banks * self.burst_bytes / self.tccd_ab_ns

    def shard(self, shards):
        """This memory's share when the KV heads are split over `shards` devices: channels / shards."""
        _integer("kv_shards", shards)
        if self.channels % shards:
            raise ValueError(
                f"kv_shards is {shards}; allowed: a divisor of the {self.channels} channels of {self.name}"
            )
        return Dram(**{**vars(self), "channels": self.channels // shards})


@dataclass(frozen=True)
class Shape:
    """The KV cache of one layer of a model: heads, head size and element size; `layers` scales latencies."""

    name: str
    kv_heads: int
    head_dim: int
    element_bytes: int
    layers: int

    def __post_init__(self):
        for key in ("kv_heads", "head_dim", "element_bytes", "layers"):
            _integer(f"{self.name}: {key}", getattr(self, key))

    @classmethod
    def from_mapping(cls, mapping, name):
        """A shape from a mapping of this class's fields; see `SHAPE_TABLE` for three."""
        return _from_mapping(cls, mapping, name)

    @property
    def kv_bytes_per_token(self):
        """K and V of one token in one layer, bytes."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    def shard(self, shards):
        """One of `shards` equal parts by KV head."""
        _integer("kv_shards", shards)
        if self.kv_heads % shards:
            raise ValueError(
                f"kv_shards is {shards}; allowed: a divisor of the {self.kv_heads} KV heads of {self.name}"
            )
        return Shape(**{**vars(self), "kv_heads": self.kv_heads // shards})


def _preset(kind, table, what, name):
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; allowed: {', '.join(table)} or a YAML file")
    return kind.from_mapping(table[name], name)


def dram(name):
    """The memory preset `name` of `DRAM_TABLE`; ValueError names the allowed ones."""
    return _preset(Dram, DRAM_TABLE, "dram", name)


def shape(name):
    """The model shape `name` of `SHAPE_TABLE`; ValueError names the allowed ones."""
    return _preset(Shape, SHAPE_TABLE, "model", name)


def derived_block_tokens(memory, token_bytes):
    """Tokens whose KV fills one region: the block size at which a block is a region (study section 1)."""
    return -(-memory.region_bytes // token_bytes)


def blocks_per_region(memory, token_bytes, block_tokens):
    """How many blocks of `block_tokens` share one region; 1 when a block covers a region or more.

    Raises ValueError when the two sizes do not divide: then no block number is a row number.
    """
    _integer("block_tokens", block_tokens)
    block, region = block_tokens * token_bytes, memory.region_bytes
    if block & (block - 1) or token_bytes < memory.burst_bytes:
        raise ValueError(
            f"block_tokens is {block_tokens} ({block} bytes of {token_bytes}-byte tokens); allowed: a power of two of "
            f"bytes, whole bursts per token, that divides the region of {region} bytes or is divided by it"
        )
    return max(1, region // block)

"""When one command may follow another in AttAcc's HBM3-PIM: presets in cycles, one table of constraints, its quirks.

A controller of a legacy channel drives two pseudo-channels of ranks, bank groups and banks. Three kinds of MAC: all
banks at once (AB), the same bank of every bank group (SB), one bank of both pseudo-channels (PB). A constraint says how
many cycles after `before` a command `after` may come on the same node of a level; the levels are the channel, its
pseudo-channels, their ranks and bank groups, and `bank`, the banks that obey one command of the mode.

AttAcc is scale-snu/attacc_simulator at commit c600051 on ramulator2 b7c70275. What its code does beside or against its
own table is a quirk, each by name in `QUIRKS`: on, the model is AttAcc's equal; off, it does what the table says.
"""

from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

MODES = ("AB", "SB", "PB")
BANKS = {"AB": 64, "SB": 16, "PB": 2}  # banks that one MAC reads, of two pseudo-channels x two ranks x 4 x 4
UNITS = {"AB": 1, "SB": 4, "PB": 32}  # sets of banks with a row of their own
BURST_BYTES = 32  # of one bank and column command: 32-bit pseudo-channel x prefetch 8
QUEUE = 33  # entries: AttAcc's buffer of 32 takes one more (`size <= max_size`)

_FILE = "AttAcc pim_ramulator_src/HBM3-PIM.cpp"
_PRESET = _FILE + ", timing_presets: absolute HBM2 times of DRAMSim3's HBM2_8Gb_x128.ini, in cycles of this rate"
_NPC = _PRESET + "; NPC: without (no) power constraint"
_RFC_NS = (350, _FILE + ", tRFC_TABLE: a channel of 8 Gb")

# preset -> (nRCD, nRP, nRAS, nRC, nRTPL, nCCDAB, nCCDSB, nREFI, rate in Mb/s, source)
PRESET_TABLE = {
    "HBM3_4.8Gbps": (17, 17, 41, 58, 8, 6, 6, 4680, 4800, _PRESET),
    "HBM3_4.8Gbps_NPC": (17, 17, 41, 58, 8, 4, 4, 4680, 4800, _NPC),
    "HBM3_5.2Gbps": (19, 19, 45, 63, 8, 6, 6, 5070, 5200, _PRESET),
    "HBM3_5.2Gbps_NPC": (19, 19, 45, 63, 8, 4, 4, 5070, 5200, _NPC),
    "HBM3_5.6Gbps": (20, 20, 48, 68, 9, 6, 7, 5460, 5600, _PRESET),
    "HBM3_5.6Gbps_NPC": (20, 20, 48, 68, 9, 4, 4, 5460, 5600, _NPC),
    "HBM3_6.0Gbps": (21, 21, 51, 72, 9, 6, 7, 5850, 6000, _PRESET),
    "HBM3_6.0Gbps_NPC": (21, 21, 51, 72, 9, 4, 4, 5850, 6000, _NPC),
    "HBM3_6.4Gbps": (23, 23, 55, 77, 10, 7, 8, 6240, 6400, _PRESET),
    "HBM3_6.4Gbps_NPC": (23, 23, 55, 77, 10, 4, 4, 6240, 6400, _NPC),
}
PRESETS = tuple(PRESET_TABLE)


@dataclass(frozen=True)
class Timing:
    """One preset: everything in cycles but `tck_ps`, picoseconds of a cycle."""

    nBL: int
    nRCD: int
    nRP: int
    nRAS: int
    nRC: int
    nRTPL: int
    nCCDS: int
    nCCDL: int
    nCCDAB: int
    nCCDSB: int
    nREFI: int
    nRFC: int
    tck_ps: int

    def __post_init__(self):
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"timing {name} is {value!r}; allowed: a whole number of at least 1")

    @property
    def hits_first(self):
        """Whether a queued hit is always ready before its row may close, which the run-length form builds on."""
        return self.nCCDAB < self.nRTPL and self.nRCD < self.nRAS


def preset(name):
    """The `Timing` of a preset; ValueError names the allowed ones."""
    if name not in PRESET_TABLE:
        raise ValueError(f"preset is {name!r}; allowed: {', '.join(PRESETS)}")
    *cycles, nrefi, rate, _ = PRESET_TABLE[name]
    nrcd, nrp, nras, nrc, nrtpl, nccdab, nccdsb = cycles
    tck_ps = 1_000_000 // (rate // 4)  # DQ pins of quadruple data rate: a cycle is four bits of a pin
    nrfc = (_RFC_NS[0] * 1_000_000 // tck_ps + 974) // 1000  # JEDEC's rounding, as Ramulator 2 does it
    return Timing(2, nrcd, nrp, nras, nrc, nrtpl, 2, 4, nccdab, nccdsb, nrefi, nrfc, tck_ps)


# pJ to bring a byte from its cells to the MAC units of a mode, activation and precharge included at AttAcc's share
_ENERGY = "AttAcc src/config.py: O'Connor et al., Fine-Grained DRAM, MICRO 2017, pJ/bit"
ENERGY_TABLE = {
    "AB": ((0.11 + 0.44) * 8, _ENERGY + ": row 0.11, cells 0.44"),
    "SB": ((0.11 + 0.44 + 1.01) * 8, _ENERGY + ": and to the bank group's multiplexer 1.01"),
    "PB": ((0.11 + 0.44 + 1.01 + 1.23 + 0.5) * 8, _ENERGY + ": and across the die 1.23 and through it 0.5"),
}

QUIRKS = {
    "refresh_skips_pseudochannels": (
        "REFab waits neither nRP after a precharge nor nRC after an activation: its scope is the channel, and "
        "check_ready() looks no deeper"),
    "refresh_burst": "refreshes that were postponed follow each other in consecutive cycles, without nRFC between",
    "activate_checks_one_pseudochannel": (
        "an activation that opens both pseudo-channels waits for the refresh of the one in its address only"),
    "precharge_unpaired": (
        "PRESB and PREPB never share a cycle with a column command: get_command_type() does not know them"),
    "same_bank_stays_open": "PRESB closes the addressed bank group only, so every refresh finds open banks in mode SB",
    "precharge_all_skips_banks": "PREA before a refresh waits neither nRAS nor nRTPL in modes SB and PB",
    "misplaced_read_to_precharge": (
        "MACPB holds up the precharge of a wrong bank as well: PIMPerBankActions is off by one level"),
    "times_one_pseudochannel": (
        "a command that acts on banks of both pseudo-channels holds up what is addressed as it is, and not what "
        "reaches the same banks by another address"),
}


class Constraint(NamedTuple):
    """`after` comes at least `cycles` (a number, or a field of `Timing`) later than `before` on one node of `level`.

    `quirk` names the quirk that the row depends on: in force while that is `when`; without one, always.
    """

    level: str
    before: str
    after: str
    cycles: int | str
    source: str
    quirk: str | None = None
    when: bool = True


# unit: the banks that one MAC reads, however they are addressed
LEVELS = ("channel", "pseudochannel", "rank", "bankgroup", "bank", "unit", "misplaced")
_PIM = _FILE + ", populate_timingcons, PIM-MAC-"
_AB, _SB, _PB = _PIM + "All-Bank", _PIM + "Same-Bank", _PIM + "Per-Bank"
_MOVE = _FILE + ", populate_timingcons, Data Movement: WRGB, MVSB and MVGB among each other"
_SFM = "; SFM itself waits for nothing: its scope is the channel"
_SLOT = ": an activation takes the row bus for two cycles"
_RAS = _FILE + ", populate_timingcons, DRAM Default, Pseudo Channel; AttAcc lacks it for this mode"
_JEDEC = "JEDEC JESD238A (HBM3), refresh: tRFC from REFab to REFab; AttAcc lacks it"
_ACTION = "AttAcc PIMPerBankActions, patches/src_dram_lambdas_action.patch"
_SKIPS, _LOOSE = "refresh_skips_pseudochannels", "precharge_all_skips_banks"

CONSTRAINTS = (
    Constraint("channel", "ACTAB", "ACTAB", 2, _AB + _SLOT),
    Constraint("channel", "ACTAB", "PREA", 2, _AB + _SLOT),
    Constraint("channel", "ACTAB", "REFab", 2, _AB + _SLOT),
    Constraint("channel", "MACAB", "MACAB", "nCCDAB", _AB),
    Constraint("channel", "ACTAB", "ACTAB", "nRC", _AB),
    Constraint("channel", "ACTAB", "MACAB", "nRCD", _AB),
    Constraint("channel", "ACTAB", "PREA", "nRAS", _AB),
    Constraint("channel", "MACAB", "PREA", "nRTPL", _AB),
    Constraint("channel", "PREA", "ACTAB", "nRP", _AB),
    Constraint("pseudochannel", "REFab", "ACTAB", "nRFC", _AB),
    Constraint("pseudochannel", "ACTAB", "REFab", "nRC", _AB, _SKIPS, False),
    Constraint("pseudochannel", "PREA", "REFab", "nRP", _AB, _SKIPS, False),
    Constraint("channel", "ACTSB", "ACTSB", 2, _SB + _SLOT),
    Constraint("channel", "ACTSB", "PRESB", 2, _SB + _SLOT),
    Constraint("channel", "ACTSB", "PREA", 2, _SB + _SLOT),
    Constraint("channel", "ACTSB", "REFab", 2, _SB + _SLOT),
    Constraint("channel", "MACSB", "MACSB", "nCCDSB", _SB),
    Constraint("bank", "ACTSB", "ACTSB", "nRC", _SB),
    Constraint("bank", "ACTSB", "MACSB", "nRCD", _SB),
    Constraint("bank", "ACTSB", "PRESB", "nRAS", _SB),
    Constraint("unit", "MACSB", "PRESB", "nRTPL", _SB + "; to all of them by PIMSameBankActions"),
    Constraint("bank", "PRESB", "ACTSB", "nRP", _SB),
    Constraint("pseudochannel", "REFab", "ACTSB", "nRFC", _SB),
    Constraint("pseudochannel", "ACTSB", "REFab", "nRC", _SB, _SKIPS, False),
    Constraint("pseudochannel", "PRESB", "REFab", "nRP", _SB, _SKIPS, False),
    Constraint("channel", "ACTSB", "PREA", "nRAS", _RAS, _LOOSE, False),
    Constraint("channel", "MACSB", "PREA", "nRTPL", _RAS, _LOOSE, False),
    Constraint("channel", "PREA", "ACTSB", "nRP", _RAS, _LOOSE, False),
    Constraint("channel", "ACTPB", "ACTPB", 2, _PB + _SLOT),
    Constraint("channel", "ACTPB", "PREPB", 2, _PB + _SLOT),
    Constraint("channel", "ACTPB", "PREA", 2, _PB + _SLOT),
    Constraint("channel", "ACTPB", "REFab", 2, _PB + _SLOT),
    Constraint("channel", "MACPB", "MACPB", "nBL", _PB),
    Constraint("rank", "MACPB", "MACPB", "nCCDS", _PB),
    Constraint("bankgroup", "MACPB", "MACPB", "nCCDL", _PB),
    Constraint("bank", "ACTPB", "ACTPB", "nRC", _PB),
    Constraint("bank", "ACTPB", "MACPB", "nRCD", _PB),
    Constraint("bank", "ACTPB", "PREPB", "nRAS", _PB),
    Constraint("bank", "MACPB", "PREPB", "nRTPL", _PB),
    Constraint("misplaced", "MACPB", "PREPB", "nRTPL", _ACTION, "misplaced_read_to_precharge", True),
    Constraint("bank", "PREPB", "ACTPB", "nRP", _PB),
    Constraint("pseudochannel", "REFab", "ACTPB", "nRFC", _PB),
    Constraint("pseudochannel", "ACTPB", "REFab", "nRC", _PB, _SKIPS, False),
    Constraint("pseudochannel", "PREPB", "REFab", "nRP", _PB, _SKIPS, False),
    Constraint("channel", "ACTPB", "PREA", "nRAS", _RAS, _LOOSE, False),
    Constraint("channel", "MACPB", "PREA", "nRTPL", _RAS, _LOOSE, False),
    Constraint("channel", "PREA", "ACTPB", "nRP", _RAS, _LOOSE, False),
    Constraint("pseudochannel", "REFab", "REFab", "nRFC", _JEDEC, "refresh_burst", False),
    Constraint("pseudochannel", "MOVE", "MOVE", "nBL", _MOVE),
    Constraint("rank", "MOVE", "MOVE", "nCCDS", _MOVE),
    Constraint("bankgroup", "MOVE", "MOVE", "nCCDL", _MOVE),
    Constraint("pseudochannel", "SFM", "MOVE", "nBL", _MOVE + _SFM),
    Constraint("rank", "SFM", "MOVE", "nCCDS", _MOVE + _SFM),
    Constraint("bankgroup", "SFM", "MOVE", "nCCDL", _MOVE + _SFM),
)

# what the event loops call a command; in mode AB, PRE is PREA
ACT, MAC, PRE, PREA, REF, MOVE, SFM, BARRIER = range(8)


def roles(mode):
    """A mode's commands -> the event loops' numbers; those of other modes are not among them."""
    found = {f"ACT{mode}": ACT, f"MAC{mode}": MAC, f"PRE{mode}": PRE, "PREA": PREA, "REFab": REF, "MOVE": MOVE,
             "SFM": SFM}
    return found | {"PREA": PRE} if mode == "AB" else found


def rules(timing, mode, quirks, constraints=CONSTRAINTS):
    """The constraints of a mode as int64 [rows, 4]: before, level, after, cycles; `quirks` is the set that is on."""
    found, names = [], roles(mode)
    for row in constraints:
        before, after = names.get(row.before), names.get(row.after)
        if before is None or after is None or (row.quirk and (row.quirk in quirks) != row.when):
            continue
        cycles = getattr(timing, row.cycles) if isinstance(row.cycles, str) else row.cycles
        found.append((before, LEVELS.index(row.level), after, cycles))
    return np.array(sorted(found), dtype=np.int64).reshape(-1, 4)


def enabled(quirks=True):
    """The set of quirks that are on: all (True), none (False), or those named. ValueError for an unknown name."""
    if isinstance(quirks, bool):
        return frozenset(QUIRKS) if quirks else frozenset()
    for name in quirks:
        if name not in QUIRKS:
            raise ValueError(f"quirk is {name!r}; allowed: {', '.join(QUIRKS)}")
    return frozenset(quirks)

"""A user's own builds of AttAcc and Ramulator 2.1, run on a trace of ours: a second opinion, never needed.

A build is found where an option says, else where ATTACC_DIR or RAMULATOR_DIR does. Nothing of either is part of this
project; what is written for them is a trace and a configuration that name their parts.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from artifact.pim import streams
from artifact.study import provenance

VARIABLES = {"attacc": "ATTACC_DIR", "ramulator": "RAMULATOR_DIR"}
_BINARIES = ("ramulator2", "build/ramulator2", "ramulator2/ramulator2", "ramulator2/build/ramulator2")
_CONFIGURATION = """\
Frontend:
  impl: PIMLoadStoreTrace
  path: {trace}
  clock_ratio: 1
  Translation: {{impl: NoTranslation, max_addr: 2147483648}}
MemorySystem:
  impl: PIMDRAM
  clock_ratio: 1
  DRAM:
    impl: HBM3-PIM
    org: {{preset: HBM3_8Gb_2R, channel: {channels}}}
    timing: {{preset: {preset}}}
  Controller:
    impl: HBM3-PIM
    Scheduler: {{impl: PIM}}
    RefreshManager: {{impl: {refresh}}}
    plugins: []
  AddrMapper: {{impl: HBM3-PIM}}
"""
_READS = """
import json, sys
import ramulator as r
dram = r.dram.HBM3(org_preset="HBM3_16Gb_8hi", timing_preset="HBM3_6400Mbps")
controller = r.controller.HBM34(
    dram=dram, scheduler=r.scheduler.FRFCFSRowHit(), refresh_manager=r.refresh_manager.NoRefresh(),
    row_policy=r.row_policy.Open(), addr_mapper=r.addr_mapper.PassThroughAddrMapper())
memory = r.memory_system.GenericDRAM(
    clock_ratio=1, controllers=[controller], channel_mapper=r.channel_mapper.PassThroughChannelMapper())
run = r.Simulation(r.frontend.ReadWriteTrace(clock_ratio=1, path=sys.argv[1]), memory)
run.run()
found = run.stats["memory_system"]["controller"]
print(json.dumps({name: found[name] for name in ("row_hits", "row_misses", "row_conflicts")}))
"""


def home(name, folder=None):
    """The folder of a build of `attacc` or `ramulator`; ValueError that says how to name one when there is none."""
    if name not in VARIABLES:
        raise ValueError(f"simulator is {name!r}; allowed: {', '.join(VARIABLES)}")
    found = provenance.simulator(VARIABLES[name]) if folder is None else folder
    if not found or not Path(found).is_dir():
        where = f"{VARIABLES[name]} is {os.environ.get(VARIABLES[name])!r}" if folder is None else f"{folder} is none"
        raise ValueError(f"no build of {name}: {where}; allowed: a folder with a build, by option or {VARIABLES[name]}")
    return Path(found)


def attacc_cycles(trace, preset, *, refresh=True, folder=None):
    """AttAcc's memory_system_cycles for a `controller.Trace` under the preset of that name."""
    root = home("attacc", folder)
    binary = next((root / name for name in _BINARIES if os.access(root / name, os.X_OK) and (root / name).is_file()),
                  None)
    if binary is None:
        raise ValueError(f"{root} holds no build of AttAcc; allowed: one of {', '.join(_BINARIES)} in it")
    with tempfile.TemporaryDirectory(prefix="artifact-") as draft:
        path = Path(draft) / "stream.trace"
        streams.write(path, trace)
        config = Path(draft) / "stream.yaml"
        channels = 1 if trace.channel.size == 1 else streams.CHANNELS
        config.write_text(_CONFIGURATION.format(trace=path, preset=preset, channels=channels,
                                                refresh="AllBankHBM3" if refresh else "No"))
        text = _output([str(binary.resolve()), "-f", str(config)], draft)
    found = re.search(r"memory_system_cycles\s*:\s*(\d+)", text)
    if found is None:
        raise ValueError(f"{binary} printed no memory_system_cycles; allowed: AttAcc c600051 or one like it")
    return int(found[1])


def ramulator_hits(rows, *, reads="1bank", folder=None):
    """Ramulator 2.1's served row-hit fraction for reads of `rows`: FR-FCFS that keeps hits, open rows, no refresh.

    Its last queue of requests is neither served nor counted.
    """
    root = home("ramulator", folder)
    with tempfile.TemporaryDirectory(prefix="artifact-") as draft:
        path = Path(draft) / "reads.trace"
        streams.write_reads(path, rows, reads=reads)
        text = _output([sys.executable, "-c", _READS, str(path)], draft, PYTHONPATH=str(root / "python"))
    found = json.loads(text.strip().splitlines()[-1])
    return found["row_hits"] / sum(found.values())


def _output(command, folder, **variables):
    try:
        done = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True,
                              check=False)
    except OSError as error:
        raise ValueError(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise ValueError(f"{command[0]} ended with exit code {done.returncode}: {last[0]}")
    return done.stdout

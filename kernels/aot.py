"""Every Triton kernel compiled for GPUs that need not be there, and what each compilation comes to.

An operator is called with tensors that have shapes and no data, its launches are recorded instead of run, and each is
compiled with the types, constants and alignments that the launch itself would have had. `python -m
artifact.kernels.aot` prints the table as CSV. Where TRITON_INTERPRET is set nothing can be compiled.

What a compilation must not come to is in `faults`. gfx942 has the configurations of the others, which were not chosen
for it: what does not fit it says so in its row.
"""

import argparse
import contextlib
import csv
import io
import itertools
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import NamedTuple

import torch
import triton
from artifact.kernels import decode, merge, predict, repair, scores, topk
from artifact.kernels.paged import PagedKV, Partial
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {"sm80": GPUTarget("cuda", 80, 32), "sm90": GPUTarget("cuda", 90, 32), "sm100": GPUTarget("cuda", 100, 32),
           "gfx942": GPUTarget("hip", "gfx942", 64)}
SHARED = {"sm80": 99 * 1024, "sm90": 99 * 1024, "sm100": 99 * 1024, "gfx942": 64 * 1024}  # bytes for one program
PIPELINED = {"attend_blocks": 2, "compressed_lse": 1, "pooled_scores": 1}  # what each reads ahead in tiles: K and V
KERNELS = {"attend_blocks": decode, "merge_parts": merge, "quest_bounds": scores, "compressed_lse": scores,
           "pooled_scores": scores, "ema": predict, "top_blocks": topk}  # and the module that launches each
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
         torch.uint8: "u8"}
STORED = {name: dtype for dtype, name in TYPES.items() if dtype.is_floating_point}
DIMS, BLOCKS, GROUPS = (64, 80, 96, 128, 192, 256), (16, 32, 64, 128, 256), (1, 3, 5, 8, 16)
KV_HEADS, PAGES, SLOTS = 8, 4096, 96


class Case(NamedTuple):
    """An operator over a cache of `dtype`; block in tokens, group in query heads per KV head."""

    operator: str
    dtype: str
    dim: int
    block: int
    group: int


SHORT = (  # what `make test` compiles; the rest is `every()`
    Case("attend", "bf16", 64, 16, 3), Case("attend", "bf16", 128, 64, 4), Case("attend", "fp16", 80, 32, 1),
    Case("attend", "bf16", 192, 128, 16), Case("attend", "fp16", 256, 256, 8), Case("attend", "fp32", 64, 64, 3),
    Case("attend", "fp32", 96, 16, 5), Case("attend", "fp32", 256, 64, 1), Case("attend_groups", "bf16", 128, 16, 4),
    Case("dense", "bf16", 128, 16, 8), Case("repair", "bf16", 128, 64, 4), Case("repair", "fp32", 128, 64, 4),
    Case("repair", "fp16", 64, 16, 16), Case("merge", "fp32", 128, 64, 4), Case("quest_scores", "bf16", 128, 16, 4),
    Case("quest_scores", "fp32", 256, 16, 1), Case("infllm_scores", "bf16", 128, 64, 16),
    Case("ema_step", "fp32", 128, 64, 4), Case("topk", "fp32", 128, 64, 4),
    Case("topk", "fp32", 128, 16, 4),
)


class Compiled(NamedTuple):
    """What one launch comes to on one target, from the assembler's own account and from its instructions.

    Numbers are None when it does not compile. On gfx942 registers are vector registers, and shared memory is LDS.
    """

    kernel: str
    target: str
    tile_tokens: int
    warps_count: int
    stages_count: int
    registers_count: int | None = None  # of a thread
    spills_bytes: int | None = None  # stores and loads; on gfx942 4 for each spilled vector register
    local_bytes: int | None = None  # stack frame
    shared_bytes: int | None = None  # dynamic
    buffers_count: int | None = None  # fewest tiles under way of anything that is read ahead; 0 = nothing is
    wide_loads_count: int | None = None  # of 16 bytes in a thread, to registers or to shared memory
    narrow_copies_count: int | None = None  # of fewer, to shared memory
    local_accesses_count: int | None = None
    global_accesses_count: int | None = None  # loads, stores and copies to shared memory
    shared_accesses_count: int | None = None  # loads and stores between registers and shared memory
    mma_count: int | None = None  # tensor core instructions
    fma_count: int | None = None  # float32 multiply-adds
    special_count: int | None = None  # exp2, log2, reciprocals
    instructions_count: int | None = None
    error: str = ""  # why it does not compile


# columns of `Compiled` -> the instructions counted for them
_NVIDIA = {"wide_loads_count": r"LDG.*\.128", "narrow_copies_count": r"LDGSTS(?!.*\.128)",
           "local_accesses_count": r"(LDL|STL)\b", "global_accesses_count": r"(LDG|STG|LDGSTS)\b",
           "shared_accesses_count": r"(LDS|LDSM|STS|STSM)\b", "mma_count": r"\w*MMA", "fma_count": r"FFMA",
           "special_count": r"MUFU", "instructions_count": ""}
_AMD = {"wide_loads_count": r"(global|buffer)_load(_lds)?_dwordx4", "narrow_copies_count": r"\w+_load_lds_(?!dwordx4)",
        "local_accesses_count": r"scratch_", "global_accesses_count": r"(global|buffer)_(load|store)",
        "shared_accesses_count": r"ds_(read|write)", "mma_count": r"v_mfma", "fma_count": r"v_(pk_)?fma(c|_f32)",
        "special_count": r"v_(exp|log|rcp)_f32", "instructions_count": ""}


class Launch(NamedTuple):
    """One launch as its launcher asked for it."""

    kernel: object
    arguments: tuple
    constants: dict
    options: dict

    @property
    def tile(self):
        """Tokens, pages or parts of one step; 0 where steps are of neither."""
        return next((self.constants[name] for name in ("TILE", "PAGES", "PARTS") if name in self.constants), 0)


def every():
    """The whole matrix: all head sizes, block sizes, groups and types, for each operator those that change its code."""
    for dtype in STORED:
        for dim in DIMS:
            for block in BLOCKS:
                for name in ("attend", "repair"):
                    yield from (Case(name, dtype, dim, block, group) for group in GROUPS)
                yield from (Case(name, dtype, dim, block, 4) for name in ("attend_groups", "dense"))
            for name in ("quest_scores", "infllm_scores"):
                yield from (Case(name, dtype, dim, 64, group) for group in GROUPS)
    yield from (Case("merge", "fp32", dim, 64, 4) for dim in DIMS)
    yield Case("ema_step", "fp32", 128, 64, 4)
    yield from (Case("topk", "fp32", 128, block, 4) for block in (64, 16))  # scores that stay in registers, and more


def launches(case):
    """The launches of a case's operator for one sequence, none of which runs."""
    found = []

    class Recorded:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def record(*arguments, num_warps=4, num_stages=3, maxnreg=None, enable_fp_fusion=True, **constants):
                options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg,
                           "enable_fp_fusion": enable_fp_fusion}
                found.append(Launch(self.kernel, arguments, constants, options))

            return record

    with contextlib.ExitStack() as stack:
        for name, module in KERNELS.items():
            kernel = getattr(module, name)
            if not isinstance(kernel, triton.JITFunction):
                raise ValueError("TRITON_INTERPRET is set: the kernels are interpreted; unset it to compile them")
            setattr(module, name, Recorded(kernel))
            stack.callback(setattr, module, name, kernel)
        _call(case)
    return found


def _call(case):
    def blank(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    dtype, heads = STORED[case.dtype], KV_HEADS * case.group
    q = blank(1, heads, case.dim, dtype=dtype)
    pages = blank(PAGES, KV_HEADS, case.block, case.dim, dtype=dtype)
    kv = PagedKV(pages, pages, blank(1, PAGES, dtype=torch.int32), blank(1, dtype=torch.int32))
    blocks = blank(1, KV_HEADS, SLOTS, dtype=torch.int32)
    state = Partial(blank(1, heads, case.dim), blank(1, heads))
    keys, length = blank(1, KV_HEADS, PAGES, case.dim, dtype=dtype), blank(1, dtype=torch.int64)
    match case.operator:
        case "attend":
            decode.attend(q, kv, blocks, parts=1)
        case "attend_groups":
            decode.attend_groups(q, kv, blocks, 4)
        case "dense":
            decode.attend(q, kv, None, parts=PAGES // 32)
        case "repair":
            repair.repair(state, q, kv, blocks, parts=1)
        case "merge":
            merge.merge(Partial(*(x.expand(SLOTS, *x.shape) for x in state)),
                        blank(SLOTS, 1, KV_HEADS, dtype=torch.bool))
        case "quest_scores":
            scores.quest_scores(q, keys, keys, length, group="max")
        case "infllm_scores":
            scores.infllm_scores(q, keys, length, PAGES // 4, size=32, stride=16, block=64)
        case "ema_step":
            predict.ema_step(*(blank(KV_HEADS, PAGES) for _ in range(3)), (0.2, 0.5, 0.25))
        case "topk":
            ranked = blank(KV_HEADS, PAGES * 64 // case.block)
            topk.topk(ranked, blank(KV_HEADS, dtype=torch.int64), ranked.bool(), SLOTS)


def source(launch):
    """A launch as the compiler takes it, with what the JIT would have known of its arguments."""
    signature, constants, known = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.constants[name] if name in launch.constants else launch.arguments[index]
        fixed = not parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and fixed):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], known[(index,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -2**31 <= value < 2**31 else "i64"
            if fixed and value % 16 == 0:
                known[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=known)


def measure(case, target_name, done=None):
    """-> a Compiled for each launch of a case. `done`: a dict of what was compiled before, for cases of equal code."""
    found, done = [], {} if done is None else done
    for launch in launches(case):
        given = source(launch)
        key = given.hash(), target_name, tuple(launch.options.items())
        if key not in done:
            done[key] = _measure(launch, given, target_name)
        found.append(done[key])
    return found


def _measure(launch, given, target_name):
    shape = Compiled(launch.kernel.fn.__name__, target_name, launch.tile, launch.options["num_warps"],
                     launch.options["num_stages"])
    try:
        binary, said = _compiled(given, TARGETS[target_name], launch.options)
    except Exception as error:  # whatever the compiler ends with is the row's reason
        return shape._replace(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    buffers = re.findall(r"ttg\.local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x\d+x\d+x", binary.asm["ttgir"])
    told, names, patterns = (_nvidia if TARGETS[target_name].backend == "cuda" else _amd)(binary, said)
    counts = {column: sum(re.match(pattern, name) is not None for name in names)
              for column, pattern in patterns.items()}
    return shape._replace(shared_bytes=binary.metadata.shared, buffers_count=min(map(int, buffers), default=0), **told,
                          **counts)


def _compiled(given, target, options):
    """The binary and what the assembler said of it, with the very options that Triton gives it."""
    said = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
        binary = triton.compile(given, target=target, options=options)
    return binary, said.getvalue()


def _nvidia(binary, said):
    """What the assembler says, the names of the instructions, and which are counted."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name], capture_output=True,
                              text=True, check=True).stdout
    stack, stores, loads = map(int, re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said).groups())
    told = {"registers_count": int(re.search(r"Used (\d+) registers", said).group(1)),
            "spills_bytes": stores + loads, "local_bytes": stack}
    return told, re.findall(r"^\s*(?:/\*\w+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)\b.*;", text, re.M), _NVIDIA


def _amd(binary, _):
    text = binary.asm["amdgcn"]

    def note(name):
        return int(re.search(rf"^\s*-?\s*\.{name}:\s*(\d+)$", text, re.M).group(1))

    told = {"registers_count": note("vgpr_count"), "spills_bytes": 4 * note("vgpr_spill_count"),
            "local_bytes": note("private_segment_fixed_size")}
    return told, re.findall(r"^\t([a-z]+_[a-z0-9_]+)", text, re.M), _AMD


def faults(row):
    """What is wrong with one compiled launch, a dict of Case and Compiled, in words; none = as it should be."""
    if row["error"]:
        return ["does not compile"]
    found = []
    if row["spills_bytes"] or row["local_bytes"] or row["local_accesses_count"]:
        found.append("local memory")
    if row["shared_bytes"] > SHARED[row["target"]]:
        found.append("shared memory")
    if not row["wide_loads_count"] or row["narrow_copies_count"]:
        found.append("narrow loads")
    tiles = PIPELINED.get(row["kernel"], 0)
    tile_bytes = row["tile_tokens"] * triton.next_power_of_2(row["dim"]) * STORED[row["dtype"]].itemsize
    if tiles and (row["buffers_count"] < 2 or row["shared_bytes"] < 2 * tiles * tile_bytes):
        found.append("no pipeline")
    if row["kernel"] == "attend_blocks" and row["dtype"] != "fp32" and not row["mma_count"]:
        found.append("no tensor cores")
    return found


def rows(cases, targets=tuple(TARGETS), workers=1):
    """Dicts of Case and Compiled: each launch of each case on each target, as they are done."""
    # cases that differ in the group alone have mostly the same code: together in one process it is compiled once
    shares = [list(share) for _, share in itertools.groupby(cases, key=lambda case: case._replace(group=0))]
    if workers == 1:
        done = {}
        for share in shares:
            yield from _share(share, targets, done)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for share in as_completed([pool.submit(_share, share, targets) for share in shares]):
            yield from share.result()


def _share(cases, targets, done=None):
    done = {} if done is None else done
    found = [{**case._asdict(), **compiled._asdict()}
             for case in cases for target in targets for compiled in measure(case, target, done)]
    return [{**row, "faults": "; ".join(faults(row)), "triton": triton.__version__, "origin": "measured"}
            for row in found]


def left(cases, targets, file):
    """For each target the cases that a table does not hold with this Triton; all when there is no such file.

    A case whose last row was cut off, as by a run that was stopped, counts as held when its first one is there.
    """
    with contextlib.suppress(FileNotFoundError), open(file, newline="") as table:
        held = {(row["target"], row["triton"], *(row[name] for name in Case._fields)) for row in csv.DictReader(table)}
        return {target: [case for case in cases if (target, triton.__version__, *map(str, case)) not in held]
                for target in targets}
    return dict.fromkeys(targets, cases)


COLUMNS = *Case._fields, *Compiled._fields, "faults", "triton", "origin"


def main(arguments=None):
    """The table of the short list or, with --full, of the whole matrix, as CSV."""
    parser = argparse.ArgumentParser(prog="python -m artifact.kernels.aot", description=main.__doc__)
    parser.add_argument("--full", action="store_true", help="the whole matrix; an hour of one core")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="all unless given")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", help="a file to which what it does not hold yet is added; stdout when not given")
    asked = parser.parse_args(arguments)
    wanted = left(list(every()) if asked.full else list(SHORT), asked.targets, asked.out or "")
    with open(asked.out, "a", newline="") if asked.out else contextlib.nullcontext(sys.stdout) as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not asked.out or not file.tell():
            writer.writeheader()
        for target, cases in wanted.items():
            for row in rows(cases, [target], asked.workers):
                writer.writerow(row)
                file.flush()


if __name__ == "__main__":
    main()

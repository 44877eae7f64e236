"""Every Triton kernel compiled for GPUs that need not be there, and what each compilation comes to.

An operator is called with tensors that have shapes and no data, its launches are recorded instead of run, and each is
compiled with the types, constants and alignments that the launch itself would have had. `python -m
artifact.kernels.aot` prints the table as CSV. Where TRITON_INTERPRET is set nothing can be compiled.
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
from artifact.kernels import decode, merge, predict, repair, scores
from artifact.kernels.paged import PagedKV, Partial
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {"sm80": GPUTarget("cuda", 80, 32), "sm90": GPUTarget("cuda", 90, 32), "sm100": GPUTarget("cuda", 100, 32)}
KERNELS = {"attend_blocks": decode, "merge_parts": merge, "quest_bounds": scores, "compressed_lse": scores,
           "pooled_scores": scores, "ema": predict}  # and the module that launches each
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
    Case("ema_step", "fp32", 128, 64, 4),
)


class Compiled(NamedTuple):
    """What one launch comes to on one target, from the assembler's own account and from its instructions."""

    kernel: str
    target: str
    tile_tokens: int
    warps_count: int
    stages_count: int
    registers_count: int
    spills_bytes: int  # stores and loads
    local_bytes: int  # stack frame
    shared_bytes: int  # dynamic
    buffers_count: int  # fewest tiles under way of anything that is read ahead; 0 = nothing is
    wide_loads_count: int  # of 16 bytes in a thread, to registers or to shared memory
    narrow_copies_count: int  # of fewer, to shared memory
    local_accesses_count: int
    mma_count: int  # tensor core instructions
    fma_count: int  # float32 multiply-adds
    instructions_count: int


class Launch(NamedTuple):
    """One launch as its launcher asked for it."""

    kernel: object
    arguments: tuple
    constants: dict
    options: dict


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
    target, found = TARGETS[target_name], []
    done = {} if done is None else done
    for launch in launches(case):
        given = source(launch)
        key = given.hash(), target_name, tuple(launch.options.items())
        if key not in done:
            done[key] = _measure(launch, given, target_name, target)
        found.append(done[key])
    return found


def _measure(launch, given, target_name, target):
    binary, said = _compiled(given, target, launch.options)
    stack, stores, loads = map(int, re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said).groups())
    buffers = re.findall(r"ttg\.local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x\d+x\d+x", binary.asm["ttgir"])
    names = re.findall(r"^\s*(?:/\*\w+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)\b.*;", _instructions(binary), re.M)

    def count(pattern):
        return sum(re.match(pattern, name) is not None for name in names)

    return Compiled(
        launch.kernel.fn.__name__, target_name, launch.constants.get("TILE", launch.constants.get("PAGES", 0)),
        launch.options["num_warps"], launch.options["num_stages"],
        int(re.search(r"Used (\d+) registers", said).group(1)), stores + loads, stack, binary.metadata.shared,
        min(map(int, buffers), default=0), count(r"LDG.*\.128"), count(r"LDGSTS(?!.*\.128)"), count(r"(LDL|STL)\b"),
        count(r"\w*MMA"), count(r"FFMA"), len(names))


def _compiled(given, target, options):
    """The binary and what the assembler said of it, with the very options that Triton gives it."""
    said = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
        binary = triton.compile(given, target=target, options=options)
    return binary, said.getvalue()


def _instructions(binary):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        return subprocess.run([triton.knobs.nvidia.nvdisasm.path, file.name], capture_output=True, text=True,
                              check=True).stdout


def rows(cases, workers=1):
    """Dicts of Case and Compiled: each launch of each case on each target, as they are done."""
    if workers == 1:
        done = {}
        for case in cases:
            yield from _rows(case, done)
        return
    # cases that differ in the group alone have mostly the same code: together in one process it is compiled once
    shares = [list(share) for _, share in itertools.groupby(cases, key=lambda case: case._replace(group=0))]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for share in as_completed([pool.submit(_share, share) for share in shares]):
            yield from share.result()


def _share(cases):
    done = {}
    return [row for case in cases for row in _rows(case, done)]


def _rows(case, done):
    return [{**case._asdict(), **compiled._asdict()} for target in TARGETS for compiled in measure(case, target, done)]


def main(arguments=None):
    """The table of the short list or, with --full, of the whole matrix, as CSV on stdout."""
    parser = argparse.ArgumentParser(prog="python -m artifact.kernels.aot", description=main.__doc__)
    parser.add_argument("--full", action="store_true", help="the whole matrix; half an hour of one core")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    asked = parser.parse_args(arguments)
    writer = csv.DictWriter(sys.stdout, [*Case._fields, *Compiled._fields], lineterminator="\n")
    writer.writeheader()
    for row in rows(every() if asked.full else SHORT, workers=asked.workers):
        writer.writerow(row)
        sys.stdout.flush()


if __name__ == "__main__":
    main()

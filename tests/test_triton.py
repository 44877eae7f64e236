"""The Triton kernels without a GPU: the tests of `tests/interpreted.py`, in a process where Triton interprets.

Whether kernels are interpreted or compiled is settled when they are imported, so both cannot live in one process.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_every_kernel_is_right_in_the_interpreter(root):
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted.py"],
                          cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout

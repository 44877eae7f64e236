"""The cache of compiled code: it is used, it notices edits, and it heals."""

import subprocess
import sys
import textwrap

SOURCE = """
from artifact import compiled
@compiled.compiled
def double(x):
    return 2 * x
print(double(21), sum(double.stats.cache_hits.values()))
"""


def _python(folder, code=SOURCE):
    path = folder / "doubling.py"
    if not path.exists() or path.read_text() != textwrap.dedent(code):
        path.write_text(textwrap.dedent(code))
    run = subprocess.run([sys.executable, path], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_the_second_process_loads_what_the_first_compiled(tmp_path):
    assert _python(tmp_path) == ["42", "0"]
    assert _python(tmp_path) == ["42", "1"]


def test_a_torn_cache_is_compiled_again(tmp_path):
    _python(tmp_path)
    files = [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]
    assert len(files) == 2
    for file in files:
        for content in (b"", file.read_bytes()[:50], b"garbage"):
            file.write_bytes(content)
            assert _python(tmp_path) == ["42", "0"]
            assert _python(tmp_path) == ["42", "1"]


def test_another_source_is_another_cache(tmp_path):
    _python(tmp_path)
    changed = SOURCE.replace("@compiled.compiled", "compiled.DIGEST = 'another'\n@compiled.compiled")
    assert _python(tmp_path, changed) == ["42", "0"]

"""A skipped test fails, and so does a missing oracle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SKIPS = {
    "in_test": "import pytest\ndef test_it():\n    pytest.skip('no')\n",
    "mark": "import pytest\n@pytest.mark.skip(reason='no')\ndef test_it():\n    pass\n",
    "module": "import pytest\npytest.importorskip('no_such_module')\n",
}


@pytest.mark.parametrize("source", SKIPS.values(), ids=SKIPS)
def test_a_skip_is_a_failure(tmp_path, source):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_skipping.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode in (1, 2), done.stdout
    assert "may not be skipped" in done.stdout


def test_the_oracles_are_installed():
    """Without them the comparisons with independent implementations could not run."""
    script = "import transformers, mlx.core, mlx_lm.models.kimi_k3"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

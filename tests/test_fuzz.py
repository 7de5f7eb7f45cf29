"""A short run of the fuzz program; the long one is `python -m fuzz` in this folder, see `fuzz/__main__.py`."""

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.run import PARSERS

# In a process of its own, whose memory is limited.
PROGRAM = """
import sys
from fuzz.run import fuzz
result = fuzz(sys.argv[1], int(sys.argv[2]), seed=int(sys.argv[3]))
sys.exit(result.fault)
"""


@pytest.mark.parametrize("parser", PARSERS)
def test_nothing_but_typed_errors_comes_of_any_input(parser):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, parser, "4000", "0"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("parser", PARSERS)
def test_most_inputs_are_nearly_right(parser, tmp_path):
    """An input that the first check refuses tests nothing: a share must be taken, and a share must not."""
    import random

    import sample_pack

    folder = sample_pack.write_pack(tmp_path)
    module = PARSERS[parser]
    inputs = [module.generate(random.Random(f"0 {number}")) for number in range(400)]
    taken = sum(module.check(data, folder) for data in inputs)
    assert 0.1 < taken / len(inputs) < 0.5
    assert len(set(inputs)) > 200

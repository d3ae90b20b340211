"""Large tensors are on huge pages in processes that compute, and only they know the setting."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
environment = dict(os.environ)
import torch
import raymoe.engine.engine, raymoe.data.generator
assert dict(os.environ) == environment
large = torch.empty(1 << 26, dtype=torch.uint8)
middle = large.data_ptr() + (1 << 25)
for line in open("/proc/self/smaps"):
    words = line.split()
    if "-" in words[0]:
        begin, end = (int(one, 16) for one in words[0].split("-"))
        is_ours = begin <= middle < end
    elif words[0] == "VmFlags:" and is_ours:
        print("hg" in words)
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has none"
)
def test_large_tensors_are_on_huge_pages_and_the_environment_is_as_it_was():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"

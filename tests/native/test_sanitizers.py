"""The C++ tests under the address and undefined-behaviour sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent.parent.parent / "native"


@pytest.mark.slow
def test_native_tests_are_clean_under_sanitizers(tmp_path: Path) -> None:
    cmake, ctest = shutil.which("cmake"), shutil.which("ctest")
    if cmake is None or ctest is None:
        pytest.skip("cmake is not installed; pip install cmake")
    options = ["-DRAYMOE_BUILD_TESTS=ON", "-DRAYMOE_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run([cmake, "-S", NATIVE, "-B", tmp_path, *options], check=True)
    subprocess.run([cmake, "--build", tmp_path, "--parallel", "2"], check=True)
    done = subprocess.run(
        [ctest, "--test-dir", tmp_path, "--output-on-failure"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100% tests passed" in done.stdout

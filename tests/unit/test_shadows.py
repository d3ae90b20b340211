"""A file that hides a package is named, before anything fails for a reason that nobody finds."""

import subprocess
import sys
from pathlib import Path

import pytest

import raymoe
from raymoe import cli, shadows
from raymoe.data.sizing import map_batches_kwargs
from raymoe.errors import ConfigError


def test_only_files_with_the_name_of_a_package_count(tmp_path: Path) -> None:
    (tmp_path / "raymoe").mkdir()
    (tmp_path / "my_ray.py").touch()
    assert shadows.find_shadow([tmp_path]) is None
    (tmp_path / "torch.py").touch()
    found = shadows.find_shadow([tmp_path / "raymoe", tmp_path])
    assert found is not None
    assert found.startswith(f"{tmp_path / 'torch.py'} hides the package 'torch'")


@pytest.mark.parametrize(
    "path",
    ["typer.py", "psutil.py", "torch/__init__.py", "click.pyc", "json.py", "email/__init__.py"],
)
def test_all_that_is_imported_may_be_hidden_by_files_and_directories(
    path: str, tmp_path: Path
) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).touch()
    name = path.split("/", maxsplit=1)[0].split(".", maxsplit=1)[0]
    found = shadows.find_shadow([tmp_path])
    assert found is not None
    assert f"hides the package {name!r}" in found


@pytest.mark.parametrize(
    "path", ["torch/weights.bin", "rows.py", "tests/__init__.py", "json.jsonl", "torch.py.txt"]
)
def test_other_files_hide_nothing(path: str, tmp_path: Path) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).touch()
    assert shadows.find_shadow([tmp_path, tmp_path / "absent"]) is None


def test_a_checkout_hides_no_installed_raymoe(tmp_path: Path) -> None:
    for name in ("__init__.py", "_version.py"):
        path = tmp_path / "raymoe" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert shadows.find_shadow([tmp_path]) is None
    path.unlink()
    assert shadows.find_shadow([tmp_path]) is not None


def test_processes_of_ours_do_not_look_in_the_working_directory() -> None:
    """Each is started with -P."""
    for path in shadows.OWN.rglob("*.py"):
        for part in path.read_text().split("[sys.executable, ")[1:]:
            assert part.startswith('"-P", '), path


def test_the_module_refuses_a_file_beside_it_before_it_imports(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("print('mine')\n")
    command = [sys.executable, "-m", "raymoe", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'typer.py'} hides the package 'typer'")
    assert not done.stdout


def test_directories_of_ray_are_not_those_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Ray is of other site-packages than this interpreter's."""
    (tmp_path / "ray" / "thirdparty_files").mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").touch()
    part = str(tmp_path / "ray" / "thirdparty_files")
    monkeypatch.setattr(sys, "path", [part, str(tmp_path), *sys.path])
    assert shadows.first_directory() == [tmp_path]


@pytest.mark.parametrize("name", ["raymoe", "ray", "torch"])
def test_a_job_beside_such_a_file_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{name}.py").write_text("import raymoe\n")
    monkeypatch.chdir(tmp_path)
    assert cli.run(["generate", "--model", "m", "--input", "i.jsonl", "--output", "o"]) == 2
    error = capsys.readouterr().err
    assert f"{name}.py hides the package '{name}'" in error
    assert "Rename it" in error
    with pytest.raises(ConfigError, match=f"{name}.py hides the package"):
        map_batches_kwargs("org/model")
    assert cli.run(["plan", "--help"]) == 0, "a plan looks for nothing here"


def test_a_name_that_does_not_load_says_which_file_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_module: str) -> None:
        raise AttributeError("module 'torch' has no attribute 'Tensor'")

    monkeypatch.delitem(raymoe.__dict__, "Engine", raising=False)
    monkeypatch.setattr(raymoe.importlib, "import_module", fail)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(AttributeError, match="no attribute 'Tensor'"):
        _ = raymoe.Engine
    (tmp_path / "torch.py").touch()
    with pytest.raises(ImportError, match=r"torch\.py hides the package 'torch'"):
        _ = raymoe.Engine


@pytest.mark.slow
def test_a_script_beside_a_torch_of_its_own_says_so(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("print('mine')\n")
    (tmp_path / "mine.py").write_text("import raymoe\nraymoe.Engine\n")
    command = [sys.executable, str(tmp_path / "mine.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert f"ImportError: {tmp_path / 'torch.py'} hides the package 'torch'" in done.stderr

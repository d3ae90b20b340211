"""The import map and the purity of planning are rules with tests; every tool can be imported."""

import ast
import functools
import importlib
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "raymoe"
FILES = sorted(PACKAGE.rglob("*.py"))

BASE = {"errors", "units", "_version"}
MAY_IMPORT = {
    "_native": {"_version"},
    "errors": {"suggestions"},
    "suggestions": set(),
    "units": set(),
    "safe_text": set(),
    "processes": set(),
    "condition": set(),
    "periodic": set(),
    "shadows": set(),
    "rotation": set(),
    "_version": set(),
    "specs": BASE | {"safe_text"},
    "vllm_names": {"errors"},
    "structured": {"errors", "safe_text", "vllm_names"},
    "regular_expressions": {"errors"},
    "config": BASE | {"specs", "plan", "structured", "vllm_names"},
    "output_schema": BASE | {"specs", "config", "safe_text", "structured", "regular_expressions"},
    "schedule": {"errors"},
    "plan": BASE | {"specs", "schedule"},
    "codecs": {"errors", "rotation", "specs"},
    "kernels": {"errors", "rotation", "codecs", "specs", "_native"},
    "device": BASE | {"_native", "specs", "kernels", "schedule"},
    "model": {"errors", "specs", "codecs", "kernels"},
    "memory": BASE | {"specs", "codecs", "schedule", "device", "kernels"},
    "runtime": {"errors", "schedule", "device", "memory", "model", "kernels", "_native"},
    "download": BASE | {"config", "periodic", "specs"},
    "assets": set(),
    "chat": {"errors"},
}
MAY_IMPORT["measure"] = {*MAY_IMPORT} - {
    "config",
    "output_schema",
    "structured",
    "assets",
    "download",
    "safe_text",
    "periodic",
}
MAY_IMPORT["engine"] = {*MAY_IMPORT, "config"} - {"assets"}
MAY_IMPORT["data"] = BASE | {
    "condition",
    "safe_text",
    "periodic",
    "shadows",
    "config",
    "output_schema",
    "structured",
    "vllm_names",
    "specs",
    "schedule",
    "plan",
    "download",
    "engine",
    "chat",
}
MAY_IMPORT["status_view"] = {"units", "data"}
MAY_IMPORT["report"] = BASE | {"safe_text", "specs", "schedule", "plan", "data", "status_view"}
MAY_IMPORT["openai"] = BASE | {
    "condition",
    "suggestions",
    "safe_text",
    "processes",
    "config",
    "specs",
    "data",
}
MAY_IMPORT["lm_eval"] = {"errors", "config", "specs", "download", "engine", "data"}
EVERYTHING = {*MAY_IMPORT, "bench", "doctor", "cli"}
MAY_IMPORT["__main__"] = {"cli", "shadows"}
MAY_IMPORT["bench"] = EVERYTHING - {"cli"}
MAY_IMPORT["doctor"] = EVERYTHING - {"cli", "data", "report", "openai", "status_view"}
MAY_IMPORT["cli"] = EVERYTHING

PURE = {
    "errors",
    "suggestions",
    "units",
    "safe_text",
    "specs",
    "structured",
    "config",
    "output_schema",
    "schedule",
    "plan",
    "assets",
    "chat",
}
ONLY_IN = {
    "ray": {"data", "cli", "lm_eval"},
    "transformers": {"engine", "bench", "doctor", "lm_eval"},
    "llguidance": {"engine"},
    "safetensors": {"memory", "bench"},
    "triton": {"kernels"},
    "humming": {"kernels"},
    "jsonschema": {"output_schema", "engine"},
    "typer": {"cli"},
}


def package_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


@functools.cache
def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            if node.module == "raymoe":
                names |= {f"raymoe.{alias.name}" for alias in node.names}
    return names


def own_imports(path: Path) -> set[str]:
    modules = imported_modules(path)
    return {name.split(".")[1] for name in modules if name.startswith("raymoe.")}


def outside_imports(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(path)} - {"raymoe"}


def wrong_imports(path: Path) -> set[str]:
    part = package_of(path)
    own, outside = own_imports(path), outside_imports(path)
    wrong = own - {part} - MAY_IMPORT[part]
    if part in PURE:
        wrong |= outside & {"torch", "numpy", "ray", "numba", "transformers"}
    return wrong | {
        library
        for library, packages in ONLY_IN.items()
        if library in outside and part not in packages
    }


def test_imports_follow_the_map() -> None:
    found = {
        str(path.relative_to(PACKAGE)): wrong_imports(path)
        for path in FILES
        if package_of(path) != "__init__"
    }
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_only_the_binding_knows_python() -> None:
    native = PACKAGE.parent / "native"
    with_python = {
        path.name
        for path in [*native.rglob("*.cpp"), *native.rglob("*.h")]
        if "pybind11" in path.read_text()
    }
    assert with_python == {"module.cpp", "tensor_caster.h"}


def test_every_tool_can_be_imported() -> None:
    for path in sorted((PACKAGE.parent / "tools").glob("*.py")):
        importlib.import_module(f"tools.{path.stem}")


def test_planning_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, raymoe, raymoe.cli\n"
        "raymoe.ModelSpec, raymoe.find_plan, raymoe.simulate, raymoe.EngineConfig\n"
        "loaded = {'torch', 'ray', 'numpy', 'transformers', 'numba'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)

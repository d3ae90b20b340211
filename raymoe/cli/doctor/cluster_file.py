"""Checks of a file for a cluster, as far as no cloud is needed, and what its nodes cost."""

import importlib
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
import yaml

from raymoe.cli.plan import node_of, planner_of, workload_of
from raymoe.config import AUTO
from raymoe.doctor.examine import Check, Examiner, Finding, Outcome, Status
from raymoe.errors import ConfigError, RaymoeError
from raymoe.plan.cluster_file import KINDS, PLACEHOLDERS, Machine
from raymoe.plan.prediction import Prediction
from raymoe.plan.rank import read_prices
from raymoe.specs.files import is_hub_name, is_in_bucket, read_text
from raymoe.specs.hardware import INSTANCES, USABLE_FRACTION, hardware_preset
from raymoe.units import CURRENCY, GIB, MIB, format_bytes, format_money, format_seconds, parse_bytes

MAX_PARTS = 100_000
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's, or typer's own copy


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """What a file says.

    Attributes:
        path: Where it is.
        text: All of it, with comments.
        content: The same as YAML reads it.
        kind: As in `raymoe.plan.cluster_file.KINDS`.
        instance: Of the nodes with engines; None if none is named.
        num_nodes: How many of those there are at most.
        is_spot: Whether the cloud may take them back.
        memory_bytes: What Ray may give to actors of such a node; None if it is not said.
        shared: Paths that all nodes see, and can write.
        read_only: Those that they can only read.
        command: The words of `raymoe generate`; empty if there is none.
    """

    path: Path
    text: str
    content: Mapping[str, Any]
    kind: str
    instance: str | None
    num_nodes: int
    is_spot: bool
    memory_bytes: int | None
    shared: tuple[str, ...]
    read_only: tuple[str, ...] = ()
    command: Sequence[str]

    @property
    def written_by(self) -> list[str]:
        """The words of `raymoe plan` in its comments; empty if there are none."""
        return _told(self.text, "raymoe plan ")

    def option(self, name: str) -> str | None:
        """An option of `raymoe generate`; None if it is not given."""
        words = list(self.command)
        return words[words.index(name) + 1] if name in words[:-1] else None


class _BoundedLoader(yaml.SafeLoader):  # type: ignore[misc] # yaml has no types
    """Counts parts with what aliases stand for: thirty that double fill any memory."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_parts: dict[int, int] = {}  # of each node, by its id

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self._num_parts:
            raise yaml.composer.ComposerError(None, None, "an alias leads back to itself", mark)
        if not is_alias:
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in parts for part in pair]
            count = 1 + sum(self._num_parts[id(part)] for part in parts)
            if count > MAX_PARTS:
                problem = f"more than {MAX_PARTS:,} parts, with what aliases stand for"
                raise yaml.composer.ComposerError(None, None, problem, mark)
            self._num_parts[id(node)] = count
        return node


def read_cluster_file(path: Path) -> ClusterFile:
    """Read a file for Ray's launcher, KubeRay, SkyPilot or SLURM.

    Raises:
        ConfigError: It is none of those, or lacks a field; says which.
    """
    text = read_text(path, what="the file", max_bytes=MIB)
    try:
        if text.startswith("#!"):
            return _of_slurm(path, text)
        content = yaml.load(text, _BoundedLoader)
        if isinstance(content, dict):
            if "available_node_types" in content:
                return _of_ray(path, text, content)
            if content.get("kind") == "RayJob":
                return _of_kuberay(path, text, content)
            if "run" in content and "resources" in content:
                return _of_skypilot(path, text, content)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply for YAML: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{path}: {type(error).__name__} {error}: a field is missing or is not what raymoe "
            "plan --write writes there; write the file again and compare"
        ) from error
    raise ConfigError(
        f"{path} is neither a cluster for Ray's launcher (available_node_types), a RayJob, a "
        "task for SkyPilot (resources and run) nor a script for SLURM (#!); raymoe plan --write "
        "writes all four"
    )


def _of_ray(path: Path, text: str, content: dict[str, Any]) -> ClusterFile:
    types = content["available_node_types"]
    (name,) = types.keys() - {content["head_node_type"]}
    worker, config = types[name], types[name]["node_config"]
    kind = f"ray-{content['provider']['type']}"
    if kind not in KINDS:  # Ray loads any module that a provider of another type names
        raise ConfigError(
            f"{path} has the provider {kind.removeprefix('ray-')!r:.60}; raymoe plan --write "
            "writes aws and gcp"
        )
    scheduling = config.get("scheduling", {})
    if isinstance(scheduling, list):  # as in Ray's examples
        scheduling = {name: value for each in scheduling for name, value in each.items()}
    volumes = _values(content["docker"]["run_options"], "--volume=")
    inside = [one.split(":")[-1] for one in volumes]
    mounted = _mounted(content.get("initialization_commands", []))
    return ClusterFile(
        path=path, text=text, content=content, kind=kind,
        instance=config.get("InstanceType") or config.get("machineType"),
        num_nodes=min(int(worker["max_workers"]), int(content["max_workers"])),
        is_spot=config.get("InstanceMarketOptions", {}).get("MarketType") == "spot"
        or scheduling.get("provisioningModel") == "SPOT" or bool(scheduling.get("preemptible")),
        memory_bytes=worker["resources"].get("memory"),
        shared=tuple(one for one in mounted if one in inside),
        command=_told(text, "python examples/submit_job.py -- "),
    )  # fmt: skip


def _of_kuberay(path: Path, text: str, content: dict[str, Any]) -> ClusterFile:
    spec = content["spec"]
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    claims = {one["name"] for one in pod["volumes"] if "persistentVolumeClaim" in one}
    mounts = [one for one in container["volumeMounts"] if one["name"] in claims]
    nodes = pod.get("nodeSelector", {})
    return ClusterFile(
        path=path, text=text, content=content, kind="kuberay",
        instance=nodes.get("node.kubernetes.io/instance-type"),
        num_nodes=int(group["replicas"]),
        is_spot=nodes.get("cloud.google.com/gke-spot") == "true"
        or nodes.get("eks.amazonaws.com/capacityType") == "SPOT",
        memory_bytes=parse_bytes(f"{container['resources']['limits']['memory']}B"),
        shared=tuple(one["mountPath"] for one in mounts if not one.get("readOnly")),
        read_only=tuple(one["mountPath"] for one in mounts if one.get("readOnly")),
        command=shlex.split(spec["entrypoint"])[2:],
    )  # fmt: skip


def _of_skypilot(path: Path, text: str, content: dict[str, Any]) -> ClusterFile:
    resources, script = content["resources"], content["run"]
    return ClusterFile(
        path=path, text=text, content=content, kind="skypilot",
        instance=resources.get("instance_type"),
        num_nodes=int(content.get("num_nodes", 1)),
        is_spot=bool(resources.get("use_spot")),
        memory_bytes=_memory(script),
        shared=tuple(_mounted(content.get("setup", "").splitlines())),
        command=_generate(script),
    )  # fmt: skip


def _of_slurm(path: Path, text: str) -> ClusterFile:
    options = _values(text.splitlines(), "#SBATCH ")
    (num_nodes,) = _values(options, "--nodes=")
    planned = _told(text, "raymoe plan ")
    named = planned[planned.index("--hardware") + 1] if "--hardware" in planned else ""
    return ClusterFile(
        path=path, text=text, content={}, kind="slurm",
        instance=named if named in INSTANCES else None,  # SLURM does not know it
        num_nodes=int(num_nodes),
        is_spot="--spot" in planned,
        memory_bytes=_memory(text),
        shared=tuple(_values(text.splitlines(), "srun --cpu-bind=none ls -d ")),
        command=_generate(text),
    )  # fmt: skip


def _memory(script: str) -> int | None:
    """What a script gives to actors of a node, in bytes; None if it does not say."""
    memory = _values(script.split(), "--memory=")
    return int(memory[0]) if memory else None


def _generate(script: str) -> list[str]:
    """The words behind `raymoe generate` in a script; empty if it is not there."""
    lines = [line.strip() for line in script.replace("\\\n", " ").splitlines()]
    commands = [line for line in lines if line.startswith("raymoe generate ")]
    return shlex.split(commands[-1])[2:] if commands else []


def _values(words: Sequence[str], start: str) -> list[str]:
    """What follows the start in words that have it."""
    return [word.removeprefix(start) for word in words if word.startswith(start)]


def _mounted(commands: Sequence[str]) -> list[str]:
    """Where commands mount a file system that nodes share."""
    return [command.split()[-1] for command in commands if "mount -t nfs" in command]


def _told(text: str, start: str) -> list[str]:
    """The words behind the start of a command in comments; empty if none begins so.

    Only commands are indented by three spaces.
    """
    comments = "\n".join(_values(text.splitlines(), "#"))
    found = _values(comments.replace("\\\n", " ").splitlines(), f"   {start}")
    return shlex.split(found[0]) if found else []


def examine_file(path: Path) -> Iterator[Finding]:
    """Yield a finding for each check.

    Raises:
        ConfigError: It is not a file for a cluster.
    """
    file = read_cluster_file(path)
    checks = {
        "schema": _schema,
        "left to replace": _placeholders,
        "node": _node,
        "engines": _engines,
        "command": _command,
        "model": _model,
        "rows and journal": _journal,
        "copied files": _copied,
        "plan": _plan,
        "cost": _cost,
    }
    listed = [Check(name, partial(check, file)) for name, check in checks.items()]
    yield from Examiner(math.inf).run(file.kind, listed)


def _schema(file: ClusterFile) -> Outcome:
    if not file.kind.startswith("ray-"):
        advice = (
            "kubectl apply --dry-run=server -f, sky jobs launch --dryrun or sbatch --test-only "
            "checks the fields"
        )
        return Outcome("only what the rows below need", Status.SKIPPED, advice)
    from ray.autoscaler._private.util import prepare_config, validate_config  # noqa: PLC0415 - slow

    validate_config(prepare_config(dict(file.content)))
    return Outcome("as Ray's launcher wants it")


def _placeholders(file: ClusterFile) -> Outcome:
    lines = [
        f"{name} in line {number}"
        for number, line in enumerate(file.text.splitlines(), 1)
        for name in PLACEHOLDERS
        if re.match(r"\s*(#SBATCH|[^#\s])", line) and name in line
    ]
    if not lines:
        return Outcome("nothing")
    return Outcome(", ".join(lines), Status.FAILED, "put yours there; the comments say what it is")


def _node(file: ClusterFile) -> Outcome:
    if file.instance is None:
        memory = "unknown" if file.memory_bytes is None else format_bytes(file.memory_bytes)
        return Outcome(f"no instance is named; memory of a node: {memory}")
    machine = Machine.find(file.instance, hardware_preset(file.instance))
    found = f"{file.instance}: {machine}"
    if file.memory_bytes is None or file.memory_bytes <= machine.memory_gib * GIB:
        return Outcome(found)
    return Outcome(
        f"{found}; the file gives {format_bytes(file.memory_bytes)} to actors",
        Status.FAILED, f"give at most {machine.memory_gib} GiB",
    )  # fmt: skip


def _engines(file: ClusterFile) -> Outcome:
    given = file.option("--num-actors") or AUTO
    if given == AUTO:
        return Outcome(f"one on each of {file.num_nodes} nodes")
    if not given.isdecimal():
        return Outcome(f"--num-actors is {given!r}", Status.FAILED, "give a whole number")
    num_actors = int(given)
    found = f"{num_actors} on {file.num_nodes} nodes"
    if num_actors == file.num_nodes:
        return Outcome(found)
    if num_actors > file.num_nodes:
        advice = "engines without a node wait for ever: take as many nodes as --num-actors says"
        return Outcome(found, Status.FAILED, advice)
    return Outcome(found, Status.WARNING, "nodes without an engine only cost: raise --num-actors")


def _command(file: ClusterFile) -> Outcome:
    if not file.command:
        return Outcome("no raymoe generate", Status.FAILED, "write the file again")
    given = _parsed("generate", file.command)
    if given["resume"]:
        return Outcome(f"{len(file.command)} words, of which all options are known")
    advice = "give --resume, so that a job that starts again goes on"
    return Outcome("starts from the first row again", Status.WARNING, advice)


def _parsed(command: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the parameters that words give a command, which is not run.

    Without options of typer's own, which act while they are read: --help prints and ends,
    --install-completion writes to the files of the user's shell.
    """
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"help_option_names": []})(
        importlib.import_module(f"raymoe.cli.{command}").run
    )
    try:
        return typer.main.get_command(app).make_context(f"raymoe {command}", list(words)).params
    except UsageError as error:
        raise ConfigError(f"raymoe {command}: {error}") from error


def _model(file: ClusterFile) -> Outcome:
    model = file.option("--model") or ""
    if "://" in model or _is_under(model, (*file.shared, *file.read_only)):
        return Outcome(f"{model}: on what all nodes see; whether it is there is not known here")
    if is_hub_name(model) and not model.startswith("/"):
        return Outcome(f"{model}: each node downloads it")
    places = ", ".join((*file.shared, *file.read_only)) or "nothing"
    advice = f"put it below what all nodes see ({places}), or name it as on the Hugging Face hub"
    return Outcome(f"{model or 'none'}: not on the nodes", Status.FAILED, advice)


def _journal(file: ClusterFile) -> Outcome:
    for option in ("--input", "--output"):
        path = file.option(option) or ""
        if "://" not in path and not _is_under(path, file.shared):
            advice = f"all nodes see {', '.join(file.shared) or 'nothing'}: put it below that"
            return Outcome(f"{option} {path or 'is missing'}", Status.FAILED, advice)
    output, journal = file.option("--output") or "", file.option("--journal")
    if journal is None and "://" not in output:
        return Outcome(f"beside {output}, which all nodes see")
    if journal is not None and (is_in_bucket(journal) or _is_under(journal, file.shared)):
        return Outcome(f"{journal}, which all nodes see")
    advice = (
        "give --journal a place in a bucket, such as s3://bucket/answers.journal, or a directory "
        "that all nodes see, so that no finished row is lost"
    )
    return Outcome(f"journal: {journal or 'none'}", Status.FAILED, advice)


def _is_under(path: str, places: Sequence[str]) -> bool:
    return any(path == place or path.startswith(f"{place.rstrip('/')}/") for place in places)


def _copied(file: ClusterFile) -> Outcome:
    mounts = file.content.get("file_mounts", {})
    sources = [one for one in mounts.values() if isinstance(one, str) and "://" not in one]
    missing = [one for one in sources if not Path(one).expanduser().exists()]
    if "." in (*sources, file.content.get("workdir")) and not Path("native").is_dir():
        missing.append("this directory is not the root of the checkout")
    if not missing:
        return Outcome(f"{len(sources)} are here")
    advice = "start in the root of the checkout; ray get-auth-token --generate makes the token"
    return Outcome("not here: " + ", ".join(missing), Status.WARNING, advice)


def _plan(file: ClusterFile) -> Outcome:
    """Plan again for the nodes that the file has now."""
    if not file.written_by or file.instance is None:
        what = "instance" if file.written_by else "command of raymoe plan in its comments"
        return Outcome(f"not known: the file has no {what}", Status.SKIPPED)
    given = _parsed("plan", file.written_by)
    node = node_of(file.instance, given["host_memory"], given["device_memory"])
    if file.memory_bytes is not None:
        usable = min(node.host_memory_bytes, int(USABLE_FRACTION * file.memory_bytes))
        node = replace(node, host_memory_bytes=usable)
    try:
        planner, rank = planner_of(given, workload_of(given), node)
    except (RaymoeError, OSError) as error:  # such as a model that is elsewhere
        return Outcome(f"not known: {error}", Status.SKIPPED)
    plan = planner(rank or node, file.num_nodes)
    found = Prediction.of(plan, file.num_nodes)
    text = (
        f"{format_bytes(plan.host_bytes)} of {format_bytes(node.host_memory_bytes)} a node; "
        f"{format_seconds(found.loading_s + found.running_s)} in all, predicted"
    )
    late_s = 3600 * (given["deadline_hours"] or math.inf)
    if found.running_s <= late_s:
        return Outcome(text)
    advice = f"it ends after the {given['deadline_hours']:g} hours of the plan: take more nodes"
    return Outcome(text, Status.WARNING, advice)


def _cost(file: ClusterFile) -> Outcome:
    prices = read_prices()
    price = None if file.instance is None else prices.prices.get(file.instance)
    kind = "spot" if file.is_spot else "on demand"
    hourly = None if price is None else price.spot if file.is_spot else price.on_demand
    if hourly is None:
        advice = f"the {kind} price of {file.instance or 'such a node'} is not in prices.json"
        return Outcome("not known", Status.SKIPPED, advice)
    total = format_money(file.num_nodes * hourly, CURRENCY)
    return Outcome(
        f"{total} an hour: {file.num_nodes} x {file.instance} at {hourly:g} ({kind}, prices of "
        f"{prices.date}); head, disks and file system come on top"
    )

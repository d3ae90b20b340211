"""Files that run a planned job on a cluster: for Ray's launcher, KubeRay, SkyPilot and SLURM.

A file is a template in `raymoe/assets/clusters` that is filled in with a `ClusterJob`; what the
templates say as comments is where each value comes from.
"""

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Self

from raymoe.errors import ConfigError, UnknownOptionError
from raymoe.plan.plan import Plan
from raymoe.plan.prediction import Prediction
from raymoe.specs.files import STORE_EXTRAS, is_hub_name, is_in_bucket
from raymoe.specs.hardware import INSTANCES, USABLE_FRACTION, HardwareSpec
from raymoe.units import CURRENCY, GB, GIB, format_bytes, format_money

TEMPLATES = Path(__file__).parent.parent / "assets" / "clusters"
# The template of each kind.
KINDS = {
    "ray-aws": "ray.yaml.jinja",
    "ray-gcp": "ray.yaml.jinja",
    "kuberay": "rayjob.yaml.jinja",
    "skypilot": "skypilot.yaml.jinja",
    "slurm": "slurm.sh.jinja",
}
SHARED = "/data"  # the file system that all nodes see
PLACEHOLDERS = (
    "FILE_SYSTEM",
    "PROJECT_ID",
    "IMAGE_ID",
    "INSTANCE_PROFILE",
    "SERVICE_EMAIL",
    "REGISTRY",
    "DIGEST",
    "PARTITION",
    "ACCOUNT",
)  # for the user to replace
COLUMNS = 100
HEAD = {"aws": "m7i.2xlarge", "gcp": "n2-standard-8"}  # 8 vCPUs and 32 GiB
HEAD_STORE_BYTES = int(4 * GB)
# Prompts and answers need little; the rest of the memory is for weights and KV cache.
STORE_FRACTION, MAX_STORE_BYTES = 0.06, int(8 * GB)
SHARED_MEMORY_BYTES = 2 * GIB  # of /dev/shm beside the object store
IMAGE_BYTES = 150 * GB  # of a node's disk: system, Ray's image, torch, and what Ray spills


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node as it is rented, or as its owner has it.

    Attributes:
        instance: Its name at the cloud; None if no cloud has it.
        num_vcpus: Threads of its cores.
        memory_gib: All of its host memory.
        gpu: Name of its GPU, such as "l40s"; empty without one.
        num_gpus: GPUs of it.
    """

    instance: str | None
    num_vcpus: int
    memory_gib: int
    gpu: str = ""
    num_gpus: int = 0

    @classmethod
    def find(cls, name: str, hardware: HardwareSpec) -> Self:
        """The instance of this name, or a machine with these rates."""
        if name.lower() in INSTANCES:
            found = INSTANCES[name.lower()]
            return cls(
                instance=name.lower(),
                num_vcpus=found.num_vcpus,
                memory_gib=found.memory_gib,
                gpu=found.gpu,
                num_gpus=found.num_gpus,
            )
        return cls(
            instance=None,
            num_vcpus=2 * hardware.num_cores,
            memory_gib=round(hardware.host_memory_bytes / USABLE_FRACTION / GIB),
            gpu=hardware.name if hardware.has_gpu else "",
            num_gpus=int(hardware.has_gpu),
        )

    @property
    def cloud(self) -> str:
        """Whose instance it is: aws or gcp; empty if no cloud's."""
        if self.instance is None:
            return ""
        return "aws" if "." in self.instance else "gcp"

    @property
    def store_bytes(self) -> int:
        """Ray's object store."""
        return min(MAX_STORE_BYTES, int(STORE_FRACTION * self.memory_gib * GIB))

    @property
    def shared_memory_gib(self) -> int:
        """Size of /dev/shm, which holds the object store."""
        return ceil((self.store_bytes + SHARED_MEMORY_BYTES) / GIB)

    @property
    def pod_cpus(self) -> int:
        """Those that a pod may ask for beside Kubernetes' own."""
        return self.num_vcpus - max(1, self.num_vcpus // 16)

    @property
    def pod_memory_gib(self) -> int:
        """Memory that a pod may ask for: without what kernel, kubelet and daemons keep.

        The kubelet's part is GKE's (a quarter of the first 4 GiB, a fifth of the next 4, 10 % up to
        16, 6 % up to 128, 2 % of the rest, and 0.1 GiB), which is more than that of others.
        """
        left, kept_gib = 0.98 * self.memory_gib, 1.1
        for size_gib, share in ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06), (left, 0.02)):
            part = min(size_gib, left)
            kept_gib, left = kept_gib + share * part, left - part
        return int(0.98 * self.memory_gib - kept_gib)

    @property
    def pod_bytes(self) -> int:
        """Of a pod's memory, those that a plan may use."""
        return int(USABLE_FRACTION * self.pod_memory_gib * GIB)

    def __str__(self) -> str:
        gpus = f", {self.num_gpus} x {self.gpu}" if self.num_gpus else ""
        return f"{self.num_vcpus} vCPUs, {self.memory_gib:,} GiB{gpus}"


def kind_of(machine: Machine, given: str | None) -> str:
    """The kind of file for a machine: the one that is given, or else that of its cloud.

    Raises:
        ConfigError: The kind is not known, or the machine is not of its cloud.
    """
    if given is not None and given not in KINDS:
        raise UnknownOptionError(given, KINDS, "--write-as")
    kind = given or (f"ray-{machine.cloud}" if machine.cloud else "kuberay")
    if kind not in {"kuberay", "slurm"} and not machine.cloud:
        raise ConfigError(
            f"--write-as {kind} needs an instance of a cloud, such as g6e.8xlarge or "
            "a2-ultragpu-1g: name it with --hardware, or write for kuberay or slurm"
        )
    if kind.startswith("ray-") and kind != f"ray-{machine.cloud}":
        raise ConfigError(
            f"--write-as {kind}: {machine.instance} is an instance of {machine.cloud}; write it as "
            f"ray-{machine.cloud}, or name another with --hardware"
        )
    return kind


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """What a file says: a job, its command and its nodes.

    Attributes:
        plan: That of each node.
        num_nodes: Nodes, with an engine on each.
        num_rows: Of the whole job.
        why_nodes: Why so many nodes, in words.
        model: A directory, or a name on the Hugging Face hub or of raymoe.
        weight_bytes: Of the model.
        options: Of `raymoe generate`, beside model, paths and number of actors.
        source: Where the nodes find the rows.
        output: Where they write.
        is_spot: Whether instances are rented that the cloud may take back.
        price: Of a node for an hour, in US dollars; None if it is not known.
        prices_of: When prices were like that.
        written_by: The command that writes this file.
        file: The name of the file.
        adapter: A directory with a LoRA adapter, merged into the model; None without.
        ray_version: That of Ray on the machine that submits, which nodes must have too.
        python_version: That of Python there, such as "3.11".
    """

    plan: Plan
    machine: Machine
    num_nodes: int
    num_rows: int
    why_nodes: str
    model: str
    weight_bytes: int
    options: tuple[str, ...]
    source: str
    output: str
    is_spot: bool
    price: float | None
    prices_of: str
    written_by: Sequence[str]
    file: str
    ray_version: str
    python_version: str
    adapter: str | None = None

    def __post_init__(self) -> None:
        for what, text in (
            ("--model", self.model),
            *([] if self.adapter is None else [("--adapter", self.adapter)]),
            ("--input", self.source),
            ("--output", self.output),
            ("--write", self.file),
            *(("option", word) for word in self.written_by),
        ):
            if not text.isprintable() or not text:
                raise ConfigError(f"{what} {text!r:.60}: a file for a cluster takes printable text")
        if self.machine.num_gpus > max(1, self.plan.num_ranks):
            raise ConfigError(
                f"{self.machine.instance} has {self.machine.num_gpus} GPUs, and the plan uses "
                f"{self.plan.num_ranks}: divide each step among them with --tensor-parallel "
                f"{self.machine.num_gpus}, or name a node with one GPU"
            )
        if self.plan.note:
            raise ConfigError(
                f"the plan leaves the GPU of {self.plan.hardware.name} idle ({self.plan.note}): "
                "rent a node without one, or plan for more rows"
            )

    @cached_property
    def is_downloaded(self) -> bool:
        """Whether nodes can download the model, by its name or from where its URI says."""
        if "://" in self.model:
            return True
        return (
            self.model.count("/") == 1 and is_hub_name(self.model) and not Path(self.model).is_dir()
        )

    @property
    def model_name(self) -> str:
        """The last part of the model's name."""
        return Path(self.model).name.lower() or "model"

    def model_path(self, kind: str) -> str:
        """What a node calls the model."""
        if "://" in self.model:
            return self.model
        if kind == "kuberay":
            return f"/models/{self.model_name}"
        return self.model if self.is_downloaded else f"{SHARED}/models/{self.model_name}"

    @property
    def adapter_path(self) -> str | None:
        """Where nodes find the adapter."""
        return None if self.adapter is None else f"{SHARED}/adapters/{Path(self.adapter).name}"

    @property
    def journal(self) -> str | None:
        """Where it is; None where it is beside the output by itself."""
        if "://" not in self.output:
            return None
        if is_in_bucket(self.output):
            return f"{self.output}.journal"
        return f"{SHARED}/{Path(self.output).name or 'answers'}.journal"

    @property
    def packages(self) -> list[str]:
        """What nodes need besides raymoe."""
        if self.journal is None or not is_in_bucket(self.journal):
            return []
        return [f"fsspec[{STORE_EXTRAS[self.journal.partition('://')[0]]}]"]

    def has_shared(self, kind: str) -> bool:
        """Whether anything is on a file system that all nodes see."""
        others = [self.source, self.output, *filter(None, (self.adapter_path, self.journal))]
        is_there = self.model_path(kind).startswith(f"{SHARED}/")
        return is_there or any("://" not in place for place in others)

    def has_store(self, kind: str) -> bool:
        """Whether anything is in an object store."""
        places = self.model_path(kind), self.source, self.output
        return any(place.partition("://")[0] in STORE_EXTRAS for place in places)

    def command(self, kind: str) -> list[str]:
        """The words of `raymoe generate`."""
        words = ["raymoe", "generate", "--model", self.model_path(kind)]
        words += [] if self.adapter_path is None else ["--adapter", self.adapter_path]
        words += ["--input", self.source, "--output", self.output]
        if self.journal is not None:
            words += ["--journal", self.journal]
        words += ["--id-column", "id", "--resume", "--num-actors", str(self.num_nodes)]
        if self.machine.num_gpus:
            # "auto" asks a cluster that has no node with a GPU yet for none.
            words += ["--device", "cuda"]
        return [*words, *self.options]

    @property
    def disk_gb(self) -> int:
        """Of a node, for its image and, where it downloads them, the weights."""
        return 50 * ceil((IMAGE_BYTES + self.is_downloaded * self.weight_bytes) / (50 * GB))

    @property
    def disk_reason(self) -> str:
        """What that is for."""
        weights = (
            f", and for {format_bytes(self.weight_bytes)} of weights, which each node downloads"
        )
        return f"Room for system and image{weights if self.is_downloaded else ''}."

    @property
    def summary(self) -> str:
        """What is planned, in sentences."""
        plan, workload = self.plan, self.plan.workload
        found = Prediction.of(plan, self.num_nodes)
        where = self.machine.instance or self.plan.hardware.name
        adapter = ""
        if self.adapter_path is not None:
            adapter = f" with an adapter, to be copied to {_name(self.adapter_path)},"
        return (
            f"The plan: {self.num_rows:,} rows of {workload.prompt_tokens:,} + "
            f"{workload.generated_tokens:,} tokens of {_name(self.model)}{adapter} on "
            f"{self.num_nodes:,} x {where} ({self.machine}), {self.why_nodes}. On each node up to "
            f"{plan.policy.max_num_seqs:,} sequences at once, schedule {plan.schedule}, "
            f"{format_bytes(plan.host_bytes)} of host memory. Predicted, not measured: "
            f"{found.parts}; {found.speed}. {self._cost(found)}"
        )

    def _cost(self, found: Prediction) -> str:
        if self.price is None:
            return "The price of such a node is not known here."
        kind = "spot" if self.is_spot else "on demand"
        hourly = format_money(self.num_nodes * self.price, CURRENCY)
        total = found.rent(self.price, self.num_nodes)
        dated = f", prices of {self.prices_of}" if self.prices_of else ""
        return (
            f"Nodes cost {hourly} an hour ({kind}{dated}), {format_money(total, CURRENCY)} for the "
            "job; head, disks and file system come on top."
        )

    def render(self, kind: str) -> str:
        """The text of the file."""
        # A plan without a file needs neither.
        from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415

        environment = Environment(
            loader=FileSystemLoader(TEMPLATES),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters |= {
            "comment": _comment,
            "command": _command,
            "name": _name,
            "quoted": shlex.quote,
            "scalar": _scalar,
            "shell": shlex.join,
            "bytes": format_bytes,
        }
        return environment.get_template(KINDS[kind]).render(
            job=self,
            kind=kind,
            cloud=self.machine.cloud,
            machine=self.machine,
            command=self.command(kind),
            model_path=self.model_path(kind),
            head=HEAD.get(self.machine.cloud),
            head_store_bytes=HEAD_STORE_BYTES,
            shared=SHARED,
            has_shared=self.has_shared(kind),
            has_store=self.has_store(kind),
        )


def _comment(text: str, indent: int = 0) -> str:
    """Lines of a comment, without the indent of the first."""
    prefix = f"{' ' * indent}# "
    lines = textwrap.wrap(
        text, COLUMNS - len(prefix), break_long_words=False, break_on_hyphens=False
    )
    return textwrap.indent("\n".join(lines), prefix).lstrip().replace(_SPACE, " ")


_SPACE = "\0"  # of a name, until its comment has its lines


def _name(text: str) -> str:
    """A name within a comment: quoted, and on one line.

    Otherwise the rest of a name could begin a line, as the commands do that are read again.
    """
    return shlex.quote(text).replace(" ", _SPACE)


def _command(words: Sequence[str]) -> str:
    r"""A command in a comment, over several lines that end in \."""
    groups: list[str] = []  # an option and its value stay together
    for word in map(shlex.quote, words):
        if word.startswith("--") or not groups:
            groups.append(word)
        else:
            groups[-1] += f" {word}"
    lines = [""]
    for group in groups:
        if lines[-1] and len(lines[-1]) + len(group) > COLUMNS - 10:
            lines.append("")
        lines[-1] += f"{group} "
    return "#   " + "\\\n#       ".join(lines).rstrip()


def _scalar(text: str, indent: int = 2) -> str:
    """A string in YAML, of which no part is read as anything else."""
    import yaml  # noqa: PLC0415 - as above

    dumped = yaml.safe_dump(text, width=COLUMNS - 16, allow_unicode=True)
    lines = dumped.removesuffix("\n").removesuffix("\n...").splitlines()
    return f"\n{' ' * indent}".join(line.strip() for line in lines)

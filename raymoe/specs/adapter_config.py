"""What `adapter_config.json` of a LoRA adapter says, and which model it is an adapter of.

Source: `LoraConfig` and `get_pattern_key` of PEFT 0.21.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from raymoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from raymoe.specs.files import CONFIG_FILE, expanded, is_hub_name, read_json_object
from raymoe.specs.module_patterns import checked_expression
from raymoe.specs.other_formats import ADAPTER_FILE, ADAPTER_WEIGHTS, MERGE_ADAPTER

MAX_RANK = 1 << 16
MAX_PATTERNS = 1024  # each of them may be tried for each tensor
# Fields that say how an adapter was trained, and those that names of tensors show.
_NOT_READ = frozenset(
    """
    auto_mapping base_model_name_or_path corda_config enable_lora eva_config exclude_modules
    inference_mode layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config
    megatron_core merge_weights modules_to_save peft_version qalora_group_size revision
    runtime_config target_modules task_type velora_config
    """.split()  # noqa: SIM905 - twenty names read better as words
)
_READ = frozenset(
    {"alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "lora_bias", "peft_type", "r"}
    | {"rank_pattern", "target_parameters", "use_rslora", "ensure_weight_tying"}
)
# Ways to start a training that leave the base as it is; others change it.
_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The content of an `adapter_config.json`.

    Attributes:
        where: The file, for messages.
        base: Directory or hub name of the model that was trained; "" if it names none.
        rank_pattern: Expressions for names of modules -> their rank; the first match counts.
        target_parameters: Ends of the names of parameters that have factors of their own.
        is_rank_stabilised: Whether the divisor of alpha is the root of the rank (rsLoRA).
        keeps_tied: Whether a head that is tied to the embedding was trained tied.
    """

    where: str
    base: str
    rank: int
    alpha: float
    rank_pattern: Mapping[re.Pattern[str], int]
    alpha_pattern: Mapping[re.Pattern[str], float]
    target_parameters: tuple[str, ...]
    is_rank_stabilised: bool
    keeps_tied: bool

    def rank_of(self, name: str) -> int:
        """The rank of a module or parameter, as transformers names it."""
        return _of_pattern(self.rank_pattern, name, self.rank)

    def scale_of(self, name: str) -> float:
        """The factor of the product of a module's or parameter's factors."""
        rank = self.rank_of(name)
        divisor = math.sqrt(rank) if self.is_rank_stabilised else rank
        return _of_pattern(self.alpha_pattern, name, self.alpha) / divisor

    @classmethod
    def of(cls, config: Mapping[str, object], where: str) -> "AdapterConfig":
        """Read the fields.

        Raises:
            UnsupportedModelError: It is no LoRA, or a field changes what it computes.
            CheckpointError: A field has a value that it cannot have.
        """
        _check_kind(config, where)
        base = config.get("base_model_name_or_path")
        targets = config.get("target_parameters") or []
        if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
            raise CheckpointError(f"{where}: target_parameters is {targets!r:.100}, not names")
        _check_count(targets, f"{where}: target_parameters")
        return cls(
            where=where,
            base=base if isinstance(base, str) else "",
            rank=_rank(config.get("r"), f"{where}: r"),
            alpha=_number(config.get("lora_alpha"), f"{where}: lora_alpha"),
            rank_pattern={
                _as_match(name): _rank(value, f"{where}: rank_pattern[{name!r:.100}]")
                for name, value in _pattern(config, "rank_pattern", where).items()
            },
            alpha_pattern={
                _as_match(name): _number(value, f"{where}: alpha_pattern[{name!r:.100}]")
                for name, value in _pattern(config, "alpha_pattern", where).items()
            },
            target_parameters=tuple(targets),
            is_rank_stabilised=bool(config.get("use_rslora")),
            keeps_tied=bool(config.get("ensure_weight_tying")),
        )

    @classmethod
    def read(cls, directory: Path) -> "AdapterConfig":
        """Read the file of an adapter's directory; raises as `of` and `read_json_object`."""
        if not (directory / ADAPTER_FILE).exists():
            raise CheckpointError(
                f"{directory}: there is no {ADAPTER_FILE}; adapter takes the directory that PEFT's "
                f"save_pretrained writes, with {ADAPTER_FILE} and {ADAPTER_WEIGHTS}"
            )
        return cls.of(read_json_object(directory, ADAPTER_FILE), str(directory / ADAPTER_FILE))


def _check_kind(config: Mapping[str, object], where: str) -> None:
    kind = config.get("peft_type")
    if kind is None:
        raise UnsupportedModelError(
            f"{where}: there is no peft_type, so that PEFT has not written the adapter; convert it "
            "to PEFT's LoRA, or merge it into its model by what wrote it and give the output"
        )
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{where}: the adapter is {kind!s:.40}, supported is PEFT's LORA; {MERGE_ADAPTER}"
        )
    for name, value in config.items():
        if name in _NOT_READ or name in _READ or not value:
            continue
        what = "DoRA" if name == "use_dora" else f"{name} = {value!r:.60}"
        raise UnsupportedModelError(
            f"{where}: {what} is not supported, only LoRA and rsLoRA; {MERGE_ADAPTER}"
        )
    start = config.get("init_lora_weights", True)
    if start not in _STARTS:
        raise UnsupportedModelError(
            f"{where}: init_lora_weights = {start!r:.60} has changed the base's weights before "
            "the training; convert it to plain LoRA (save_pretrained of PEFT with "
            f"path_initial_model_for_weight_conversion), or {MERGE_ADAPTER}"
        )


def _rank(value: object, where: str) -> int:
    if type(value) is int and 1 <= value <= MAX_RANK:
        return value
    raise CheckpointError(f"{where} is {value!r:.100}; expected a rank of 1 to {MAX_RANK}")


def _number(value: object, where: str) -> float:
    if type(value) in {int, float} and math.isfinite(value):  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    raise CheckpointError(f"{where} is {value!r:.100}; expected a number")


def _pattern(config: Mapping[str, object], name: str, where: str) -> Mapping[str, object]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where}: {name} is {value!r:.100}; expected an object")
    _check_count(value, f"{where}: {name}")
    # A module that none matches is compared with all of them.
    checked_expression("|".join(value), "")
    return value


def _check_count(patterns: Collection[object], where: str) -> None:
    if len(patterns) > MAX_PATTERNS:
        raise CheckpointError(f"{where} has {len(patterns):,} entries; at most {MAX_PATTERNS:,} "
                              "are read")  # fmt: skip


def _as_match(pattern: str) -> re.Pattern[str]:
    return checked_expression(pattern, rf"(?:.*\.)?(?:{pattern})$")


Value = TypeVar("Value")


def _of_pattern(patterns: Mapping[re.Pattern[str], Value], name: str, default: Value) -> Value:
    return next((value for one, value in patterns.items() if one.match(name)), default)


def base_and_adapter(
    model_source: str | Path, adapter: str | Path | None
) -> tuple[str | Path, AdapterConfig | None, Path | None]:
    """Return the model to load, and the configuration and directory of its adapter, if any.

    Args:
        model_source: A model, or the directory of an adapter, whose base is then the model.
        adapter: The directory of an adapter.

    Raises:
        ConfigError: There is no such directory, or the base of an adapter is not known.
        CheckpointError: As `AdapterConfig.read`.
        UnsupportedModelError: As `AdapterConfig.read`.
    """
    given = None if adapter is None else expanded(adapter)
    if given is not None and not given.is_dir():
        raise ConfigError(
            f"adapter is {str(adapter)!r}, which is no directory; it takes the one that PEFT's "
            "save_pretrained writes; 'hf download NAME' prints that of one on the hub"
        ).at(path=given)
    source = expanded(model_source) if str(model_source).startswith("~") else Path(model_source)
    is_adapter = (source / ADAPTER_FILE).is_file() and not (source / CONFIG_FILE).exists()
    if not is_adapter:
        return model_source, None if given is None else AdapterConfig.read(given), given
    if given is not None and given.resolve() != source.resolve():
        raise ConfigError(
            f"the model {str(model_source)!r} is an adapter, and adapter={str(adapter)!r} is "
            "another one; give the model that they are adapters of, and one adapter"
        )
    config = AdapterConfig.read(source)
    return _base(config, source), config, source.absolute()


def _base(config: AdapterConfig, directory: Path) -> str:
    advice = f"give that model, and adapter={str(directory)!r}"
    if not config.base:
        raise ConfigError(f"{config.where} names no base_model_name_or_path; {advice}")
    if Path(config.base).is_dir() or is_hub_name(config.base):
        return config.base
    raise ConfigError(
        f"{config.where}: base_model_name_or_path is {config.base!r:.200}, which is not on this "
        f"machine; {advice}"
    )

"""The manifest of a job: everything that its tokens depend on, as JSON beside its output.

Written once, whole or not at all; a job that continues must agree with it.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raymoe._version import __version__
from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.journal import open_private, sync_directory
from raymoe.engine.tasks.rows import TaskOptions
from raymoe.errors import CheckpointError, ConfigError
from raymoe.specs.files import parse_json_object, read_file

if TYPE_CHECKING:
    from raymoe.engine.identity import ModelIdentity

FORMAT = 4  # of this file, of the keys and of the records: a change of any of them raises it
FILE_NAME = "manifest.json"

# Since `FORMAT`; files without them have the defaults.
_ADDED = frozenset({"reasoning_parser", "rollout"})
# Names and versions that may differ as long as the contents that they stand for do not.
_FOR_PEOPLE = ("model", "raymoe")
_DEFAULTS = SamplingParams()
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the tokens of a job depend on besides its rows.

    Attributes:
        raymoe: Version that wrote it; others of the same format may go on.
        model: Directory or hub name, for people; the contents are below.
        revision: Commit on the hub; None for a directory, which then agrees with any.
        config: Digest of config.json and generation_config.json.
        weights: Digest of the weight files; "" where it is not known yet, which agrees with any.
        sampling_params: Of rows that have none of their own, as far as they differ from raymoe's.
        max_model_len: Limit given by the user; None is the model's.
        on_too_long: What happens to long prompts.
        split_special_tokens: Whether texts of rows have no special tokens.
        compute_dtype: Operands of products with weights, as `EngineConfig` has them.
        adapter: Digest of the files of a LoRA adapter; "" without one.
        chat_template_kwargs: Of rows of messages that have none of their own.
        task: Options of a task besides generation; empty for generation.
        reasoning_parser: Whose marks constraints and stop strings wait for; "auto" is that of the
            chat template.
        rollout: Name of the function of each row; "" without one.
    """

    format: int = FORMAT
    raymoe: str = __version__
    model: str
    revision: str | None
    config: str
    weights: str
    tokenizer: str
    chat_template: str
    sampling_params: Mapping[str, Any]
    seed: int
    dtype: str
    kv_dtype: str
    state_dtype: str
    max_model_len: int | None
    on_too_long: str
    split_special_tokens: bool = False
    compute_dtype: str = "auto"
    adapter: str = ""
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    task: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reasoning_parser: str = "auto"
    rollout: str = ""

    @classmethod
    def of(  # noqa: PLR0917 - what an operator has
        cls,
        identity: "ModelIdentity",
        sampling_params: SamplingParams,
        config: EngineConfig,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        task: TaskOptions | None = None,
        reasoning_parser: str = "auto",
        rollout: str = "",
    ) -> "Manifest":
        """Return the manifest of a job with this model and these options.

        Where the weights are still being read it has no digest of them.
        """
        dtype = identity.dtype if config.dtype == "auto" else config.dtype
        return cls(
            model=identity.name,
            revision=identity.revision,
            config=identity.config,
            weights=identity.weights if identity.has_weights else "",
            tokenizer=identity.tokenizer,
            chat_template=identity.chat_template,
            sampling_params=json.loads(json.dumps(plain_params(sampling_params))),
            seed=config.seed,
            dtype=dtype,
            kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
            state_dtype=config.state_dtype,
            max_model_len=config.max_model_len,
            on_too_long=config.on_too_long,
            split_special_tokens=config.split_special_tokens,
            compute_dtype=config.compute_dtype,
            adapter=identity.adapter,
            chat_template_kwargs=json.loads(json.dumps(dict(chat_template_kwargs or {}))),
            task={} if task is None else json.loads(json.dumps(dataclasses.asdict(task))),
            reasoning_parser=reasoning_parser,
            rollout=rollout,
        )

    @property
    def digest(self) -> str:
        plain = dataclasses.asdict(self)
        for name in (*_FOR_PEOPLE, "revision"):
            del plain[name]
        # As before there were these options.
        if not self.split_special_tokens:
            del plain["split_special_tokens"]
        if self.compute_dtype == "auto":
            del plain["compute_dtype"]
        if not self.adapter:
            del plain["adapter"]
        if self.reasoning_parser == "auto":
            del plain["reasoning_parser"]
        if not self.rollout:
            del plain["rollout"]
        return hashlib.blake2b(_json(plain), digest_size=16).hexdigest()

    def differences(self, now: "Manifest") -> list[str]:
        """Return each field that has another value now, with both; [] when the two agree."""
        old, new = dataclasses.asdict(self), dataclasses.asdict(now)
        if None in (self.revision, now.revision):
            old["revision"] = new["revision"] = None
        if not now.weights:
            old["weights"] = ""
        old |= _flat("sampling_params", old.pop("sampling_params"))
        new |= _flat("sampling_params", new.pop("sampling_params"))
        changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if not set(changed) - set(_FOR_PEOPLE):
            return []
        return [f"{name} was {_shown(old, name)}, is {_shown(new, name)}" for name in changed]


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from raymoe's own, as JSON can hold them."""
    names = [field.name for field in dataclasses.fields(params)]
    given = {name: getattr(params, name) for name in names}
    changed = {name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}
    if params.logit_bias is not None:
        changed["logit_bias"] = sorted(params.logit_bias.items())
    if params.structured_outputs_params is not None:
        changed["structured_outputs"] = dataclasses.asdict(params.structured_outputs_params)
    return changed


def claim(path: Path, manifest: Manifest) -> None:
    """Write a manifest, or compare it with the one that is there.

    Of several processes that do it at once, one writes and the others compare.

    Raises:
        ConfigError: It belongs to another job; names each difference.
    """
    if not path.exists():
        _write_first(path, manifest)
    check(path, manifest)


def check(path: Path, manifest: Manifest) -> None:
    """Compare with a manifest that was written before.

    Raises:
        ConfigError: They differ, or it cannot be read.
    """
    compare(read(path), manifest, where=path)


def compare(found: Manifest, manifest: Manifest, *, where: object) -> None:
    """Refuse a manifest that was written before and differs.

    Raises:
        ConfigError: Names each difference.
    """
    differences = found.differences(manifest)
    if differences:
        raise ConfigError(
            f"{where} is of another job, whose rows would be mixed with those of this one: "
            f"{'; '.join(differences)}. Resume with the model and the options of that job, or "
            "start anew with another output or journal_dir (raymoe generate: --overwrite)"
        )


def read(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        ConfigError: It is not there, damaged, or of another format.
    """
    try:
        data = read_file(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_WHAT_TO_DO}") from error
    return parse(data, where=path)


def parse(data: bytes, *, where: object) -> Manifest:
    """Return the manifest that a file holds.

    Raises:
        ConfigError: It is damaged, or of another format.
    """
    try:
        found = parse_json_object(data, where=str(where))
    except CheckpointError as error:
        raise ConfigError(f"{where} cannot be read: {error}; {_WHAT_TO_DO}") from error
    if found.get("format") != FORMAT:
        raise ConfigError(
            f"{where} is of format {found.get('format')!r}, written by raymoe "
            f"{found.get('raymoe')}; this raymoe {__version__} reads format {FORMAT}: resume with "
            f"that version, or {_WHAT_TO_DO}"
        )
    names = {field.name for field in dataclasses.fields(Manifest)}
    names -= _ADDED - found.keys()
    if found.keys() != names:
        wrong = ", ".join(sorted(found.keys() ^ names))
        raise ConfigError(f"{where} is damaged ({wrong}); {_WHAT_TO_DO}")
    return Manifest(**found)  # type: ignore[arg-type]  # a wrong type is a difference


def is_manifest(data: bytes) -> bool:
    """Whether a file that holds this is a manifest, of any format."""
    try:
        found = parse_json_object(data, where="the manifest")
    except CheckpointError:
        return False
    return {"format", "raymoe", "weights"} <= found.keys()


def as_bytes(manifest: Manifest) -> bytes:
    return json.dumps(dataclasses.asdict(manifest), indent=2).encode() + b"\n"


_WHAT_TO_DO = "remove it with the files beside it to start anew (raymoe generate: --overwrite)"


def _write_first(path: Path, manifest: Manifest) -> None:
    temporary = _write_temporary(path, manifest)
    try:
        # Unlike a rename, a link never replaces what is there.
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(temporary)
    except OSError:  # a file system without links: the last of those at once wins, all compare
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _write_temporary(path: Path, manifest: Manifest) -> Path:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with open(temporary, "xb", opener=open_private) as file:
        file.write(as_bytes(manifest))
        file.flush()
        os.fsync(file.fileno())
    return temporary


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _flat(name: str, params: Any) -> dict[str, Any]:
    if not isinstance(params, Mapping):
        return {name: params}
    return {f"{name}.{key}": value for key, value in params.items()}


def _shown(fields: Mapping[str, Any], name: str) -> str:
    """Return a value for a message; a parameter that is as by default is not in the file."""
    if name not in fields:
        key = name.partition(".")[2]
        return f"{getattr(_DEFAULTS, key, None)!r}" if key else "not there"
    text = repr(fields[name])
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."

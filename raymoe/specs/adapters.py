"""Which weights of a model a LoRA adapter changes, as PEFT names and stores its tensors.

Source: `Linear.get_delta_weight`, `Embedding.get_delta_weight` and `ParamWrapper` of PEFT 0.21. An
adapter names modules and parameters as transformers does, which may differ from the names in
the checkpoint of its base; `specs.families.stored_names` has both.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raymoe.errors import CheckpointError, UnsupportedModelError
from raymoe.specs.adapter_config import AdapterConfig
from raymoe.specs.layer_weights import EMBEDDING, HEAD
from raymoe.specs.model import ModelSpec
from raymoe.specs.other_formats import ADAPTER_WEIGHTS, MERGE_ADAPTER
from raymoe.specs.weight_names import Location, StoredTensors, unquantised_tensors
from raymoe.specs.weights import Shape

PREFIX = "base_model.model."
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_FACTOR = re.compile(r"(.+)\.lora_(?:(A|B)\.(weight|bias)|embedding_(A|B))")
# Names in a state_dict, which save_pretrained of PEFT writes without that of the adapter.
_NAMED = re.compile(
    r".+\.(?:lora_(?:embedding_)?[AB]|modules_to_save)\.([\w-]+)(?:\.(?:weight|bias))?"
)
_OTHER_KINDS = re.compile(r"\.(lora_\w+|token_adapter|\w+_adapter)\b")
_WRAPPED = ".base_layer"
_LABEL_HEADS = ("score", "classifier")  # modules of classifiers in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Names of the tensors A and B of a stored tensor, whose change is `scale` * B @ A.

    Attributes:
        a: Of shape [rank, inputs]; of parameters with experts [experts * rank, inputs].
        b: Of shape [outputs, rank], or [outputs, rank * experts].
        num_experts: None for a matrix.
        is_swapped: Whether the product is the change of the transposed tensor: of parameters that
            are stored [inputs, outputs], and of embeddings.
    """

    a: str
    b: str
    scale: float
    num_experts: int | None = None
    is_swapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an adapter does to one weight of a model.

    Attributes:
        location: Where the weight is in a tensor of the adapter's names.
        saved: The tensor of the adapter that takes the place of the base's; None if none does.
        factors: Those of what is added.
        added: A vector that is added, and its factor: `lora_bias`.
    """

    location: Location
    saved: str | None = None
    factors: Factors | None = None
    added: tuple[str, float] | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors of the adapter that it is made of."""
        factors = () if self.factors is None else (self.factors.a, self.factors.b)
        added = () if self.added is None else (self.added[0],)
        return (*factors, *added, *(() if self.saved is None else (self.saved,)))


@dataclass(slots=True)
class _Patch:
    """The tensors of an adapter for one module or parameter, by their role."""

    module: str
    depth: int = 0  # of wrappers around the module, each with the factors of one parameter
    tensors: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        return min(self.tensors.values())


def find_changes(
    spec: ModelSpec, config: AdapterConfig, shapes: Mapping[str, Shape]
) -> dict[str, Change]:
    """Find the weights that the tensors of an adapter change (name -> shape), by canonical name.

    Raises:
        UnsupportedModelError: A tensor belongs to another kind of adapter.
        CheckpointError: A tensor belongs to nothing in the model, lacks its other factor, or has
            the wrong shape; names it.
    """
    patches, tensors = list(_patches(shapes)), _Tensors(config, shapes)
    chosen = tensors.best_names(spec, patches)
    found: dict[str, Change] = {}
    for patch in patches:
        places = ((names, tensors.target(names, patch)) for names in chosen)
        names, target = next((place for place in places if place[1] is not None), (None, None))
        if names is not None and target is not None:
            for name, change in tensors.changes(names, target, patch):
                found[name] = _both(name, found.get(name), change, patch)
        elif not any(names.is_unread(patch.module) for names in chosen):
            raise CheckpointError(
                f"{config.where}: tensor {patch.describe()!r} changes {patch.module}, which "
                f"{spec.name} does not have ({spec.model_type}); {_advice(config, patch)}"
            )
    return found


def _advice(config: AdapterConfig, patch: _Patch) -> str:
    if patch.module.removesuffix(".weight") in _LABEL_HEADS:
        merged = MERGE_ADAPTER.replace(
            "ForCausalLM.from_pretrained(DIRECTORY)",
            "ForSequenceClassification.from_pretrained(DIRECTORY, num_labels=COUNT)",
        )
        return f"it is the head of a classifier, whose labels its model must have: {merged}"
    return f"the adapter may be one of {config.base or 'another model'}"


def _patches(shapes: Mapping[str, Shape]) -> Iterator[_Patch]:
    patches: dict[tuple[str, int], _Patch] = {}
    for tensor in sorted(shapes):
        if not tensor.startswith(PREFIX):
            raise CheckpointError(
                f"{ADAPTER_WEIGHTS}: tensor {tensor!r} does not begin with {PREFIX!r}, as those of "
                "PEFT do; convert the adapter to PEFT's format"
            )
        name = tensor.removeprefix(PREFIX)
        match = _FACTOR.fullmatch(name)
        named = _NAMED.fullmatch(name) if match is None else None
        if named is not None:
            raise CheckpointError(
                f"{ADAPTER_WEIGHTS}: tensor {tensor!r} has the name of an adapter in its own, "
                f"{named[1]!r}, with which PEFT reads none; write the adapter with save_pretrained "
                "of PEFT, or the tensors under names without it"
            )
        other = _OTHER_KINDS.search(name)
        if match is None and other is not None:
            raise UnsupportedModelError(
                f"{ADAPTER_WEIGHTS}: tensor {tensor!r} is of a kind ({other[1]}) that is not "
                f"supported, only LoRA and rsLoRA; {MERGE_ADAPTER}"
            )
        path, role = (name, "saved") if match is None else (match[1], _role(match))
        module, depth = path.replace(_WRAPPED, ""), path.count(_WRAPPED)
        key = (module, 0) if role == "saved" else (module, depth)
        patch = patches.setdefault(key, _Patch(*key))
        patch.tensors[role] = tensor
    yield from patches.values()


def _role(match: re.Match[str]) -> str:
    if match[4] is not None:
        return f"embedding {match[4]}"
    return match[2] if match[3] == "weight" else f"{match[2]} bias"


class _Tensors:
    """The tensors of an adapter by name, with what its configuration says of them."""

    def __init__(self, config: AdapterConfig, shapes: Mapping[str, Shape]) -> None:
        self._config, self._shapes = config, shapes

    def best_names(self, spec: ModelSpec, patches: Sequence[_Patch]) -> list[StoredTensors]:
        """The ways to name the model's tensors, those first in which most patches have a target."""
        modules = [f"{patch.module}.weight" for patch in patches]
        found: list[tuple[int, StoredTensors]] = []
        for names in unquantised_tensors(spec, modules):
            count = sum(self.target(names, patch) is not None for patch in patches)
            found.append((count, names))
            if count == len(patches):
                break
        return [names for _, names in sorted(found, key=lambda pair: -pair[0])]

    def target(self, names: StoredTensors, patch: _Patch) -> str | None:
        """The stored tensor that a patch changes; None if there is none of that name."""
        if "saved" in patch.tensors:
            return patch.module if patch.module in names.shapes else None
        parameters = [name for name in names.of_module(patch.module) if self._is_parameter(name)]
        if parameters:  # each wrapper is around that of the parameter before it
            index = len(parameters) - 1 - patch.depth
            return parameters[index] if index >= 0 else None
        weight = f"{patch.module}.weight"
        return weight if weight in names.shapes and not patch.depth else None

    def _is_parameter(self, name: str) -> bool:
        """Whether the factors of a tensor are those of a parameter, instead of a module."""
        return any(f".{name}".endswith(f".{end}") for end in self._config.target_parameters)

    def changes(
        self, names: StoredTensors, target: str, patch: _Patch
    ) -> Iterator[tuple[str, Change]]:
        """The changes of all weights that the stored tensor `target` holds."""
        tensors, shape, weights = dict(patch.tensors), names.shapes[target], names.weights[target]
        if (saved := tensors.get("saved")) is not None:
            self._check_shape(saved, shape, f"the base has {target} of that shape")
            yield from ((name, Change(location=at, saved=saved)) for name, at in weights)
            return
        module = target if self._is_parameter(target) else patch.module
        if (vector := tensors.pop("B bias", None)) is not None:
            bias, added = f"{patch.module}.bias", (vector, self._config.scale_of(module))
            if bias not in names.shapes:
                raise CheckpointError(
                    f"{ADAPTER_WEIGHTS}: tensor {vector!r} is added to {bias}, which the base does "
                    "not have; lora_bias is supported where there is one"
                )
            self._check_shape(vector, names.shapes[bias], f"the base has {bias} of that shape")
            yield from (
                (name, Change(location=at, added=added)) for name, at in names.weights[bias]
            )
        factors = self._factors(module, tensors, shape, weights[0][1])
        yield from ((name, Change(location=at, factors=factors)) for name, at in weights)

    def _factors(
        self, module: str, tensors: Mapping[str, str], target: Shape, location: Location
    ) -> Factors:
        """The factors of a stored tensor of the shape `target`, checked against it."""
        is_embedding = "embedding A" in tensors or "embedding B" in tensors
        roles = ("embedding A", "embedding B") if is_embedding else ("A", "B")
        if tensors.keys() != {*roles}:
            raise CheckpointError(
                f"{ADAPTER_WEIGHTS}: {module} has {', '.join(sorted(tensors.values()))} alone; "
                "LoRA has two factors of each matrix, A and B; the file is not whole"
            )
        a, b = (tensors[role] for role in roles)
        rank, num_experts, is_swapped = self._config.rank_of(module), None, is_embedding
        if location.expert is not None and len(target) == 3:
            num_experts, target = target[0], target[1:]
            # PEFT before 0.18 takes every parameter for [inputs, outputs].
            found = (*self._shapes[b][:1], *self._shapes[a][-1:])
            is_square = target[0] == target[1]
            is_swapped = location.is_transposed if is_square else found == target[::-1]
        if len(target) != 2:
            raise CheckpointError(
                f"{ADAPTER_WEIGHTS}: tensor {a!r} changes {module} of shape {list(target)}; LoRA "
                "changes matrices, and parameters with a matrix for each expert"
            )
        rows = rank * (num_experts or 1)
        what = f"{module} of {' x '.join(map(str, target))} and rank {rank} take it"
        outputs, inputs = target[::-1] if is_swapped else target
        self._check_shape(a, (rows, inputs), what)
        self._check_shape(b, (outputs, rows), what)
        scale = self._config.scale_of(module)
        return Factors(a=a, b=b, scale=scale, num_experts=num_experts, is_swapped=is_swapped)

    def _check_shape(self, name: str, expected: Shape, why: str) -> None:
        shape = self._shapes[name]
        if shape == expected:
            return
        text = (
            f"{ADAPTER_WEIGHTS}: tensor {name!r} has shape {list(shape)}, expected is "
            f"{list(expected)} ({why})"
        )
        if name.endswith(VOCABULARY) and shape[1:] == expected[1:]:
            text += (
                "; an adapter with another vocabulary than its base is not supported: resize the "
                f"base and {MERGE_ADAPTER}"
            )
        raise CheckpointError(text)


def _both(name: str, first: Change | None, second: Change, patch: _Patch) -> Change:
    """Two changes of a weight: a tensor in the place of the base's, and what is added to it."""
    if first is None:
        return second
    twice = [
        role
        for role in ("saved", "factors", "added")
        if getattr(first, role) is not None and getattr(second, role) is not None
    ]
    if twice or first.location.rows != second.location.rows:
        raise CheckpointError(
            f"{ADAPTER_WEIGHTS}: tensor {patch.describe()!r} changes {name}, which another tensor "
            "changes too; the adapter names the same matrix in two ways"
        )
    return replace(
        first,
        saved=first.saved or second.saved,
        factors=first.factors or second.factors,
        added=first.added or second.added,
    )


def adapted_model(spec: ModelSpec, config: AdapterConfig, changes: Collection[str]) -> ModelSpec:
    """The model as it is held with these weights changed.

    Quantised matrices that change are unquantised, with the others of their network. A head that
    was tied to an embedding is a matrix of its own where one of both changes.

    Raises:
        UnsupportedModelError: The adapter was trained with the two tied.
    """
    if spec.tie_word_embeddings and not {EMBEDDING, HEAD}.isdisjoint(changes):
        if config.keeps_tied:
            raise UnsupportedModelError(
                f"{config.where}: ensure_weight_tying with factors of the embedding or the head is "
                f"not supported; {MERGE_ADAPTER}"
            )
        spec = replace(spec, tie_word_embeddings=False)
    if spec.quantization is None:
        return spec
    return replace(spec, quantization=spec.quantization.with_merged(changes))

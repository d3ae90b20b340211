"""Names of stored tensors: what `from_pretrained` of transformers reads, raymoe reads as well.

Each model is written under the names of transformers' modules, under those that it saves, with each
of its renamings alone and with all others, and below every prefix that a model or head may have.
transformers decides which of these count: it reads them without a missing or unexpected tensor.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightTransform,
    revert_weight_conversion,
)

from raymoe.errors import RaymoeError
from raymoe.memory.weights import WeightStore
from raymoe.specs.model import ModelSpec
from raymoe.specs.weight_names import model_weights
from tests.parity.configurations import Configuration, first_of_each_family
from tests.parity.driver import generate, load_decoder
from tests.parity.oracle import FEW_ROWS, as_stored, make_checkpoint, make_reference

Tensors = dict[str, Tensor]
ROOTS = (
    "model.",
    "",
    "model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.language_model.model.",
    "thinker.model.",
    "thinker.",
)
HEADS = ("lm_head.", "model.lm_head.", "language_model.lm_head.", "thinker.lm_head.")
HEADS += ("model.language_model.lm_head.",)
# A dozen renamings of each module, which files have all of or none.
RENAMED_WHOLE = ("deepseek_v4", "hy_v4", "hy_v4_vl")
_OTHER_PARTS = re.compile(r"model\.(vision|multi_modal|visual|audio|mm_proj)")
_HEAD = re.compile(r"(?:^|.*\.)lm_head\.(weight|bias)$")
_EMBEDDING = re.compile(r"(.*?)(?:embed_tokens|embeddings|wte)\.weight$")


def renamed(model: PreTrainedModel, transforms: list[WeightTransform]) -> Tensors:
    """The tensors of a model with these conversions undone."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if not transforms:
        return tensors
    model._weight_conversions = transforms
    try:
        return revert_weight_conversion(model, tensors)
    finally:
        del model._weight_conversions


def conversions(model: PreTrainedModel, *, but: int | None = None) -> list[WeightTransform]:
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [each for i, each in enumerate(found) if i != but and not isinstance(each, PrefixChange)]


def ways(model: PreTrainedModel) -> Iterator[tuple[str, Tensors]]:
    """Ways to name the tensors of a model; the first is that of its modules."""
    modules, saved = renamed(model, []), renamed(model, conversions(model))
    yield "modules", modules
    yield "saved", saved
    is_whole = model.config.model_type in RENAMED_WHOLE
    parts = () if is_whole else get_model_conversion_mapping(model, add_legacy=False)
    for i, one in enumerate(parts):
        yield f"only {one}", renamed(model, [one])
        yield f"all but {one}", renamed(model, conversions(model, but=i))
    for what, tensors in (("modules", modules), ("saved", saved)):
        own = next(found[1] for name in tensors if (found := _EMBEDDING.match(name)))
        for root in ROOTS:
            for head in HEADS:
                names = {name: below(name, own, root, head) for name in tensors}
                yield f"{what}, {root}* and {head}*", {names[n]: tensors[n] for n in tensors}


def below(name: str, own: str, root: str, head: str) -> str:
    """The name of a tensor with other prefixes: of the model, which has `own`, and of its head."""
    if found := _HEAD.match(name):
        return head + found[1]
    if name.startswith(own) and not _OTHER_PARTS.match(name):
        return root + name.removeprefix(own)
    return name


def write(directory: Path, tensors: Tensors, config: str) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(config)
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def is_read_by_transformers(model: PreTrainedModel, directory: Path) -> bool:
    try:
        found, info = type(model).from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
    except (RuntimeError, ValueError, KeyError, AttributeError):
        return False
    if info["missing_keys"] or info["unexpected_keys"]:
        return False
    tensors = found.state_dict()
    return all(
        tensor.shape == tensors[name].shape and torch.equal(tensor, tensors[name])
        for name, tensor in model.state_dict().items()
    )


def read(directory: Path) -> Tensors:
    spec = ModelSpec.from_directory(directory)
    store = WeightStore.open(spec, directory)
    weights = {name: store(name) for name in model_weights(spec)}
    assert all(isinstance(weight, Tensor) for weight in weights.values())
    return {name: weight.clone() for name, weight in weights.items()}


def differing(ours: Tensors, wanted: Tensors) -> list[str]:
    assert ours.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(ours[name], wanted[name])]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.slow
@pytest.mark.parametrize("case", first_of_each_family(), ids=lambda case: case.family)
def test_what_transformers_reads_is_read(case: Configuration, tmp_path: Path) -> None:
    model = as_stored(make_checkpoint(case, tmp_path / "saved"))
    wanted = read(tmp_path / "saved")
    config = (tmp_path / "saved" / "config.json").read_text()
    tried, num_read = set(), 0
    failed = []
    for number, (what, tensors) in enumerate(ways(model)):
        if frozenset(tensors) in tried:
            continue
        tried.add(frozenset(tensors))
        directory = write(tmp_path / str(number), tensors, config)
        try:
            wrong = differing(read(directory), wanted)
        except RaymoeError as error:
            if is_read_by_transformers(model, directory):
                failed.append(f"{what}: {error}")
            continue
        num_read += 1
        failed += [f"{what}: {name} differs" for name in wrong]
    assert not failed
    assert num_read > 1


# One family for each kind of difference between modules and files.
KINDS = {
    "hy_v3": "other names of a router and its bias",
    "granitemoe": "experts in one tensor, in a module of another name",
    "laguna": "a bias beside the experts",
    "ernie4_5_moe": "a bias of another shape",
    "gemma4": "a wrapper",
}


@pytest.mark.parametrize("family", KINDS)
def test_names_of_modules_are_read(family: str, tmp_path: Path) -> None:
    case = next(case for case in first_of_each_family() if case.family == family)
    model = make_checkpoint(case, tmp_path / "saved")
    config = (tmp_path / "saved" / "config.json").read_text()
    modules = write(tmp_path / "modules", renamed(model, []), config)
    assert not differing(read(modules), read(tmp_path / "saved"))


def test_a_bias_that_is_not_stored_is_zero_and_norms_that_are_not_used_stay_unread(
    tmp_path: Path,
) -> None:
    """The checkpoint of A.X-K1, as SK Telecom stores it."""
    case = next(case for case in first_of_each_family() if case.family == "axk1")
    model = make_checkpoint(case, tmp_path / "saved")
    config = (tmp_path / "saved" / "config.json").read_text()
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    for name in biases:
        del tensors[name]
    tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.rand(model.config.hidden_size)
    published = write(tmp_path / "published", tensors, config)
    ours = read(published)
    assert [bool(ours[name].any()) for name in biases] == [False] * 2
    theirs = type(model).from_pretrained(
        published, dtype=torch.float32, attn_implementation="eager"
    )
    reference = make_reference(theirs, case, FEW_ROWS)
    tokens = generate(load_decoder(published), reference.prompts, FEW_ROWS.max_new_tokens)
    assert tokens == reference.tokens

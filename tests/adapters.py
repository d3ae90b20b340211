"""Adapters that PEFT itself writes, and the models that PEFT makes of them."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

SIZE = 0.2  # of random factors: tokens differ from those of the base


def make_adapter(
    model: PreTrainedModel, directory: Path, *, seed: int = 1, **fields: Any
) -> PreTrainedModel:
    """Write a random adapter of a model, which is changed; return it with the adapter merged.

    Args:
        fields: Of `LoraConfig`.
    """
    generator = torch.Generator().manual_seed(seed)
    with _without_warnings():
        adapted = get_peft_model(model, LoraConfig(**fields))
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                _change(name, parameter, generator)
        adapted.save_pretrained(directory, save_embedding_layers=False)
        return adapted.merge_and_unload()


def merged_model(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """The model with the adapter of a directory, as PEFT reads and merges it."""
    with _without_warnings():
        return PeftModel.from_pretrained(model, directory).merge_and_unload()


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """PEFT 0.21 warns of tied weights, and asks transformers 5.24 for what that will drop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def _change(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    drawn = torch.randn(parameter.shape, generator=generator) * SIZE
    parameter.copy_(drawn if re.search(r"\.lora_\w+\.", name) else parameter + drawn)

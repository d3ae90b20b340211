"""The supported families, by `model_type`."""

from collections.abc import Mapping

from raymoe.specs.families.compressed import COMPRESSED_FAMILIES
from raymoe.specs.families.grouped import DENSE_FAMILIES, MOE_FAMILIES
from raymoe.specs.families.hybrid import HYBRID_FAMILIES
from raymoe.specs.families.latent import LATENT_FAMILIES
from raymoe.specs.families.published import in_class_fields
from raymoe.specs.families.rules import Family
from raymoe.specs.families.wrappers import WRAPPERS, TextPart, text_part

__all__ = [
    "FAMILIES",
    "MODEL_TYPE_ALIASES",
    "TESTED_WITH",
    "WRAPPERS",
    "TextPart",
    "in_class_fields",
    "text_part",
]

FAMILIES: Mapping[str, Family] = {
    **DENSE_FAMILIES,
    **MOE_FAMILIES,
    **HYBRID_FAMILIES,
    **LATENT_FAMILIES,
    **COMPRESSED_FAMILIES,
}
# Whose classes the tests compare every family with.
TESTED_WITH = "transformers 5.24.0"
# Kimi-K2 has its own model type and DeepSeek-V3's architecture (Moonshot's deployment guide:
# "reuses the DeepSeekV3CausalLM architecture"); MiniMax-M3 without images is its text part.
# EXAONE-4.5's text part had a name of its own at first. MiMo-V2.6 is MiMo-V2-Flash with other sizes
# (SGLang and vLLM run both by one class).
MODEL_TYPE_ALIASES: Mapping[str, str] = {
    "exaone4_5_text": "exaone4",
    "kimi_k2": "deepseek_v3",
    "mimo_v2": "mimo_v2_flash",
    "minimax_m3": "minimax_m3_vl_text",
}

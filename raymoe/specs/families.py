"""The supported families, by `model_type`."""

from collections.abc import Mapping

from raymoe.specs.families_deepseek import DEEPSEEK_FAMILIES
from raymoe.specs.families_dense import DENSE_FAMILIES
from raymoe.specs.families_latent import LATENT_FAMILIES
from raymoe.specs.families_moe import MOE_FAMILIES
from raymoe.specs.family import Family

FAMILIES: Mapping[str, Family] = {
    **DENSE_FAMILIES,
    **MOE_FAMILIES,
    **DEEPSEEK_FAMILIES,
    **LATENT_FAMILIES,
}
# Kimi-K2 has a type of its own and the architecture of DeepSeek-V3 (Moonshot's deployment guide:
# "reuses the DeepSeekV3CausalLM architecture").
MODEL_TYPE_ALIASES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}

"""What directories and files hold that are no model in safetensors, and what to do with each."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

ADAPTER_FILE, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# How a file begins that git-lfs has not replaced by its content.
POINTER = b"version https://git-lfs.github.com/spec/"
MERGE_ADAPTER = (
    "merge it into its model with peft (AutoPeftModelForCausalLM.from_pretrained(DIRECTORY)"
    ".merge_and_unload().save_pretrained(OUTPUT)) and give the output"
)
_SAVE = "AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIRECTORY)"
_CONVERTED = "take the repository that it was converted from"
# Expression for names of files -> what they hold, and what to do. The first match counts.
_FORMATS: Mapping[str, tuple[str, str]] = {
    r".*\.gguf(\..*)?": (
        "a model of llama.cpp (GGUF)",
        f"{_CONVERTED}, or write it as safetensors with transformers: "
        "AutoModelForCausalLM.from_pretrained(DIRECTORY, gguf_file=NAME, quantization_config="
        "GgufConfig(dequantize=True)).save_pretrained(OUTPUT), and AutoTokenizer with gguf_file",
    ),
    r"consolidated.*|params\.json": (
        "a model in the format of its publisher (consolidated, params.json)",
        "take the files for transformers (config.json, model*.safetensors), which most such "
        "repositories have too, or convert it with the script of transformers' repository for "
        "the family (convert_mistral_weights_to_hf.py, convert_llama_weights_to_hf.py)",
    ),
    r"weights(\..*)?\.npz": ("a model of MLX", _CONVERTED),
    r"mlc-chat-config\.json|params_shard_\d+\.bin": ("a model of MLC", _CONVERTED),
    r"openvino_.*": ("a model of OpenVINO", _CONVERTED),
    r".*\.distcp|global_step\d+|.*_model_states\.pt|pytorch_model_fsdp.*": (
        "the state of a training (FSDP or DeepSpeed)",
        "gather it into a model with the trainer (accelerate merge-weights, zero_to_fp32.py)",
    ),
    r"(?!training_args|optimizer|scheduler|rng_state).*\.(bin|pt|pth|ckpt|pkl)": (
        "pickled weights, and loading a pickle runs code from it",
        f"convert the checkpoint to safetensors ({_SAVE} writes it)",
    ),
    r".*\.h5": (
        "weights of TensorFlow",
        f"{_CONVERTED}; transformers 4 reads them with from_tf=True and writes safetensors",
    ),
    r".*\.msgpack": (
        "weights of Flax",
        f"{_CONVERTED}; transformers 4 reads them with from_flax=True and writes safetensors",
    ),
    r".*\.onnx(_data)?": ("a model in ONNX", _CONVERTED),
    r".*\.(engine|plan|nemo|tflite|mlmodel|mlpackage|ggml|ot|pte)": (
        "a model of another runtime",
        _CONVERTED,
    ),
}


def is_pointer(content: bytes) -> bool:
    return content.startswith(POINTER)


def pointer_problem(path: Path | str) -> str:
    """What to say of a file that holds the pointer of Git LFS."""
    return (
        f"{path}: a pointer of Git LFS (a clone without git-lfs), not the file itself; run "
        "'git lfs install && git lfs pull' there, or download the repository with 'hf download'"
    )


def other_format(names: Collection[str]) -> str | None:
    """Say what these files are, if they are of another format, and what to do."""
    for pattern, (what, advice) in _FORMATS.items():
        found = sorted(name for name in names if re.fullmatch(pattern, name, re.IGNORECASE))
        if found:
            return f"{found[0]} holds {what}; {advice}"
    return None


def no_config_problem(directory: Path) -> str:
    """What to say of a directory without config.json."""
    names = {path.name for path in directory.iterdir()}
    found = other_format(names)
    if found is None:
        inside = next(_models_below(directory), None)
        found = f"{inside} has one; give that directory" if inside else "give a model's directory"
    return f"{directory}: there is no config.json; {found}"


def _models_below(directory: Path) -> Iterator[Path]:
    """Directories below with a config.json, the newest last step of a training first."""
    found = [
        path.parent for depth in ("*", "*/*") for path in directory.glob(f"{depth}/config.json")
    ]
    numbers = [(*map(int, re.findall(r"\d+", path.name)), 0) for path in found]
    yield from (path for _, path in sorted(zip(numbers, found, strict=True), reverse=True))


def adapter_problem(directory: Path, adapter: Mapping[str, object]) -> str:
    """What to say of a directory that holds an adapter, with or without a model beside it."""
    base = adapter.get("base_model_name_or_path") or adapter.get("model")
    kind = adapter.get("peft_type") or adapter.get("fine_tune_type") or "unknown kind"
    what = f"an adapter ({kind!s:.40}) of the model {base!s:.200}"
    if not (directory / "config.json").exists():
        return (
            f"{directory}: {ADAPTER_FILE} is {what}, which is no model by itself; give that model, "
            "and this directory as adapter"
        )
    return (
        f"{directory}: {ADAPTER_FILE} is {what}, and lies beside config.json; transformers would "
        "load the model here and apply the adapter. Give the directory as adapter too, to do the "
        "same; set ignore_adapter if the weights here are the ones you mean (an adapter already "
        "merged)"
    )


def is_of_mlx(config: Mapping[str, object]) -> bool:
    """Whether MLX wrote a configuration with quantised weights."""
    found = config.get("quantization")
    return isinstance(found, Mapping) and {"group_size", "bits"} <= found.keys()


MLX_PROBLEM = (
    "quantised by MLX (the field 'quantization'), whose weights only MLX reads; "
    f"{_CONVERTED}, or one quantised by AWQ, GPTQ, FP8 or compressed-tensors"
)

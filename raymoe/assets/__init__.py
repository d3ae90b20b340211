"""Where are the files of the bundled demo model?"""

from pathlib import Path


def demo_model_path() -> Path:
    """Return the directory of the bundled model: a small trained Mixtral and its tokenizer.

    Examples:
        >>> (raymoe.demo_model_path() / "config.json").is_file()
        True
    """
    return Path(__file__).parent / "demo_model"

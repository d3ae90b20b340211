import pytest

from tests.unit.engine.fakes import write_byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory):
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from raymoe.errors import CheckpointError
from raymoe.memory.checkpoint import Checkpoint
from raymoe.units import MIB

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor(3.0, dtype=torch.float16),
    "empty": torch.empty(0, 4),
}


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(begin: int, end: int, shape: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_sharded(directory: Path, weight_map: dict | None = None) -> None:
    save_file({"a": TENSORS["a"]}, directory / "model-1.safetensors")
    save_file({"b": TENSORS["b"]}, directory / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = {"metadata": {}, "weight_map": names | (weight_map or {})}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def refused(directory: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        Checkpoint.open(directory)


def test_tensors_of_one_file_are_those_that_were_saved(tmp_path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.names() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        stored = checkpoint.tensor(name)
        assert stored.dtype == tensor.dtype
        assert torch.equal(stored, tensor)


def test_tensors_of_shards_are_found_by_the_index(tmp_path) -> None:
    write_sharded(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.tensor("b"), TENSORS["b"])
    assert checkpoint.entry("a").file == "model-1.safetensors"


def test_a_single_file_wins_over_an_index(tmp_path) -> None:
    write_sharded(tmp_path)
    save_file({"only": TENSORS["a"]}, tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).names() == {"only"}


def test_misaligned_data_is_read_right(tmp_path) -> None:
    values = torch.tensor([1.0, 2.0])
    header = json.dumps({"a": entry(0, 8, [2])}).encode()
    header += b" " * ((3 - 8 - len(header)) % 4)  # the format itself pads to 8
    write(tmp_path / "model.safetensors", header, values.numpy().tobytes())
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.entry("a").offset % 4 == 3
    assert torch.equal(checkpoint.tensor("a"), values)


def test_reading_maps_pages_and_dropping_them_gives_them_back(tmp_path) -> None:
    def mapped() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssFile:")[1].split()[0]) * 1024

    big = torch.ones(8 * MIB)
    save_file({"a": big}, tmp_path / "model.safetensors")
    before = mapped()
    checkpoint = Checkpoint.open(tmp_path)
    tensor = checkpoint.tensor("a")
    assert mapped() - before < 4 * MIB  # opening reads the header only
    assert tensor.sum() == big.sum()
    assert mapped() - before > 30 * MIB
    checkpoint.drop_pages(["a"])
    assert mapped() - before < 4 * MIB
    assert tensor[0] == 1


def test_flags_are_listed_but_not_read(tmp_path) -> None:
    save_file({"flags": torch.arange(3) > 1}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.shapes() == {"flags": (3,)}
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*'flags'.*BOOL.*supported"):
        checkpoint.tensor("flags")


def test_unknown_names_are_refused(tmp_path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        Checkpoint.open(tmp_path).tensor("x")


def test_directories_without_weights_say_what_was_expected(tmp_path) -> None:
    refused(tmp_path, r"expected model\.safetensors")
    refused(tmp_path / "nowhere", "not a directory")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_and_never_opened(tmp_path, name: str) -> None:
    os.mkfifo(tmp_path / name)  # opening it would block for ever
    refused(tmp_path, f"{name} holds .*(pickled|publisher).*convert")


def test_shards_without_their_index_are_refused(tmp_path) -> None:
    save_file(TENSORS, tmp_path / "model-00001-of-00002.safetensors")
    refused(tmp_path, r"neither model\.safetensors nor model\.safetensors\.index\.json")


@pytest.mark.parametrize(
    "file",
    [
        "../model-2.safetensors",
        "/etc/hostname.safetensors",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        "a\\b.safetensors",
        "a\0.safetensors",
        "model.bin",
        7,
        None,
    ],
)
def test_shard_names_that_are_not_plain_are_refused(tmp_path, file) -> None:
    save_file({"b": TENSORS["b"]}, tmp_path / "model-2.safetensors")
    directory = tmp_path / "model"
    directory.mkdir()
    write_sharded(directory, {"b": file})
    refused(directory, "plain name|not the name of")


def test_links_that_leave_the_directory_are_refused(tmp_path) -> None:
    save_file(TENSORS, tmp_path / "outside.safetensors")
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    refused(directory, "link that leaves")


def test_links_inside_the_directory_are_followed(tmp_path) -> None:
    save_file(TENSORS, tmp_path / "weights.bin.safetensors")
    (tmp_path / "model.safetensors").symlink_to("weights.bin.safetensors")
    assert Checkpoint.open(tmp_path).names() == TENSORS.keys()


def make_hub_cache(root: Path) -> Path:
    blobs = root / "models--org--name" / "blobs"
    snapshot = root / "models--org--name" / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(TENSORS, blobs / "f00d")
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    return snapshot


def test_the_hub_cache_may_link_to_its_blobs(tmp_path) -> None:
    assert Checkpoint.open(make_hub_cache(tmp_path)).names() == TENSORS.keys()


def test_the_hub_cache_may_not_link_to_another_model(tmp_path) -> None:
    snapshot = make_hub_cache(tmp_path)
    save_file(TENSORS, tmp_path / "other")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../other")
    refused(snapshot, "link that leaves")


def test_pipes_directories_and_dangling_links_are_refused(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    refused(tmp_path, "is a pipe, not a file")
    path.unlink()
    path.mkdir()
    refused(tmp_path, "is a directory, not a file")
    path.rmdir()
    path.symlink_to("gone")
    refused(tmp_path, "cannot be read")


def test_a_loop_of_links_is_refused(tmp_path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    refused(tmp_path, r"model\.safetensors")


def test_a_missing_shard_is_named(tmp_path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    refused(tmp_path, r"model-2\.safetensors.*cannot be read")


def test_a_tensor_that_the_index_misplaces_is_named(tmp_path) -> None:
    write_sharded(tmp_path, {"b": "model-1.safetensors"})
    (tmp_path / "model-2.safetensors").unlink()
    refused(tmp_path, r"model-1\.safetensors.*'b' is missing")


def test_tensors_in_the_shards_of_one_another_are_named(tmp_path) -> None:
    write_sharded(tmp_path, {"a": "model-2.safetensors", "b": "model-1.safetensors"})
    refused(tmp_path, r"model-2\.safetensors.*'a' is missing")


def test_a_tensor_that_the_index_does_not_know_is_told_apart(tmp_path) -> None:
    write_sharded(tmp_path)
    save_file({"b": TENSORS["b"], "x": TENSORS["a"]}, tmp_path / "model-2.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.names(), checkpoint.unindexed) == ({"a", "b", "x"}, {"x"})


@pytest.mark.parametrize("counting", ["model-1.safetensors", "model-2.safetensors"])
def test_of_a_tensor_in_two_shards_that_of_the_index_counts(tmp_path, counting: str) -> None:
    write_sharded(tmp_path, {"a": counting})
    save_file({"a": TENSORS["a"] + 1, "b": TENSORS["b"]}, tmp_path / "model-2.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.entry("a").file == counting
    expected = TENSORS["a"] + (counting == "model-2.safetensors")
    assert torch.equal(checkpoint.tensor("a"), expected)


def test_a_tensor_in_two_shards_that_the_index_does_not_know_is_named(tmp_path) -> None:
    write_sharded(tmp_path)
    for number, name in ((1, "a"), (2, "b")):
        tensors = {name: TENSORS[name], "x": TENSORS["c"]}
        save_file(tensors, tmp_path / f"model-{number}.safetensors")
    refused(tmp_path, r"model-2\.safetensors.*'x' is also in model-1")


@pytest.mark.parametrize(
    "index",
    ["[]", "{", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"a": 1, "a": 2}', "[" * 99999],
)
def test_broken_indexes_are_refused(tmp_path, index: str) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    refused(tmp_path, "index.json")


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_truncated_files_are_refused(tmp_path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, r"model\.safetensors.*(too short|truncated)")


def test_a_truncated_tensor_is_named(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"first": torch.zeros(4), "second": torch.zeros(400)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    refused(tmp_path, r"truncated in tensor '(first|second)'.*8 bytes short")


def test_a_file_that_becomes_shorter_while_it_is_mapped_is_named(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(64 * MIB // 4)}, path)
    checkpoint = Checkpoint.open(tmp_path)
    os.truncate(path, 4096)
    assert torch.equal(checkpoint.tensor("a"), torch.ones(4))
    with pytest.raises(CheckpointError, match=r"safetensors: became shorter .* 'b' ends at byte"):
        checkpoint.tensor("b").sum()


def test_a_file_that_is_replaced_while_it_is_mapped_stays_as_it_was(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4096)}, path)
    checkpoint = Checkpoint.open(tmp_path)
    (tmp_path / "new").write_bytes(b"short")
    (tmp_path / "new").replace(path)
    assert torch.equal(checkpoint.tensor("a"), torch.ones(4096))


def test_bytes_behind_the_last_tensor_are_refused(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes() + b"x")
    refused(tmp_path, "1 bytes behind the last")


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, "'b' overlaps"),
        ({"a": entry(0, 8, [2]), "b": entry(0, 8, [2])}, "overlaps"),
        ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, "'b' follows a hole"),
        ({"a": entry(4, 12, [2])}, "'a' follows a hole"),
        ({"a": entry(0, 12, [2])}, "needs 8 bytes, data_offsets hold 12"),
        ({"a": entry(0, 12, [2**62, 4])}, "needs"),
        ({"a": entry(8, 0, [2])}, "not a range"),
        ({"a": entry(0, 12, [-3])}, "not a list of sizes"),
        ({"a": entry(0, 12, [3.0])}, "not a list of sizes"),
        ({"a": entry(0, 12, [True, 3])}, "not a list of sizes"),
        ({"a": entry(0, 12, "3")}, "not a list of sizes"),
        ({"a": entry(-4, 8, [3])}, "not a list of sizes"),
        ({"a": entry(0, 2**70, [2**68])}, "not a list of sizes"),
        ({"a": entry(0, 12, [3], "F128")}, "unknown type 'F128'"),
        ({"a": entry(0, 12, [3], ["F32"])}, "unknown type"),
        ({"a": {"dtype": "F32", "shape": [3]}}, "data_offsets is None"),
        ({"a": 3}, "expected an object"),
        ([], "expected an object"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "not valid JSON"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, header, match: str) -> None:
    write(tmp_path / "model.safetensors", header, bytes(12))
    refused(tmp_path, match)


def test_headers_that_would_take_hours_to_check_are_refused(tmp_path) -> None:
    # Sizes whose product has millions of digits, and a long search for what occurs twice.
    write(tmp_path / "model.safetensors", {"a": entry(0, 12, [2**62] * 1_000_000)}, bytes(12))
    refused(tmp_path, "at most 64 of them")
    names = [f"{index}" for index in range(400_000)]
    header = "{" + ",".join(f'"{name}":1' for name in [*names, names[-1]]) + "}"
    write(tmp_path / "model.safetensors", header.encode(), bytes(12))
    refused(tmp_path, "'399999' occurs twice")


def test_absurd_header_lengths_are_refused(tmp_path) -> None:
    for length in (2**63, 2**40, 200_000_000, 1000):
        write(tmp_path / "model.safetensors", {"a": entry(0, 12, [3])}, bytes(12), length=length)
        refused(tmp_path, "header of")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_our_error(tmp_path_factory, content: bytes) -> None:
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / "model.safetensors").write_bytes(content)
    refused(directory, "safetensors")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_harmless(tmp_path_factory, position: int, byte: int) -> None:
    directory = tmp_path_factory.mktemp("flip")
    path = directory / "model.safetensors"
    save_file(TENSORS, path)
    content = bytearray(path.read_bytes())
    content[position % len(content)] = byte
    path.write_bytes(content)
    try:
        checkpoint = Checkpoint.open(directory)
        for name in checkpoint.names():
            if checkpoint.entry(name).dtype in {"F32", "F16", "BF16"}:
                checkpoint.tensor(name).sum()
    except CheckpointError:
        pass

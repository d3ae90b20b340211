"""Data sets of the hub as input: one commit, one configuration, one split, or a refusal."""

import io
import json
import pickle
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.utils import glob_translate
from huggingface_hub.errors import HTTPError

from raymoe.cli.sources import find_files, open_source
from raymoe.cli.storage import Location
from raymoe.download import datasets
from raymoe.errors import ConfigError
from tests.hub import COMMIT, used_hub

NAME = "hf://datasets/org/questions"
PLACE = f"datasets/org/questions@{COMMIT}"


@pytest.fixture
def hub(tmp_path):
    with used_hub(tmp_path / "hub") as found:
        yield found


def parquet(**columns):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def lines(*ids):
    return b"".join(json.dumps({"id": one, "prompt": f"q{one}"}).encode() + b"\n" for one in ids)


def put(hub, *names, **options):
    """Add the data set, of files that only have names, or of given ones."""
    files = {"dataset_infos.json": b"{}"}
    files |= {name: b"-" for name in names if isinstance(name, str)}
    for given in names:
        files |= given if isinstance(given, dict) else {}
    hub.put("datasets/org/questions", files, **options)


def names(uri):
    return [file.path.removeprefix(f"{PLACE}/") for file in find_files(uri)]


def refusal(uri):
    with pytest.raises(ConfigError) as caught:
        find_files(uri)
    return str(caught.value)


def test_rows_come_from_one_commit(hub):
    put(hub, {"data/train-00000-of-00002.parquet": parquet(id=[1, 2], prompt=["a", "b"]),
              "data/train-00001-of-00002.parquet": parquet(id=[3], prompt=["c"])})  # fmt: skip
    source = open_source(NAME, id_column="id")
    assert source.ids.to_pylist() == [1, 2, 3]
    rows = pa.concat_tables(source.tables(["prompt"]))
    assert rows.column("prompt").to_pylist() == ["a", "b", "c"]
    assert str(source.files[0]) == f"hf://{PLACE}/data/train-00000-of-00002.parquet"
    assert all(COMMIT in path for _, path in hub.requests if "/resolve/" in path)


def test_lines_are_read_by_a_process_that_gets_the_place_only(hub):
    put(hub, {"questions.jsonl": lines(1, 2, 3)})
    source = pickle.loads(pickle.dumps(open_source(NAME, id_column="id")))
    rows = pa.concat_tables(source.tables(["prompt"]))
    assert rows.column("prompt").to_pylist() == ["q1", "q2", "q3"]


def test_paths_and_globs_name_files(hub):
    put(hub, "data/train.jsonl", "data/test.jsonl", "more/a b.jsonl")
    both = ["data/test.jsonl", "data/train.jsonl"]
    for end in ("/data/*.jsonl", "@main/data/t*.jsonl", f"@{COMMIT}/data/**"):
        assert names(NAME + end) == both
    assert names(f"{NAME}/data/test.jsonl") == ["data/test.jsonl"]
    assert names(f"{NAME}/more/") == ["more/a b.jsonl"]
    assert "no file that ends in .parquet" in refusal(f"{NAME}/nothing")
    assert str(Location.parse(f"{NAME}/data")) == f"hf://{PLACE}/data"


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (("data/train-00000-of-00001.parquet", "data/unseen_1-00000-of-00001-ab12.parquet"),
         {"train": [0], "unseen_1": [1]}),
        (("train.csv", "dev.csv", "my-eval.csv"), {"train": [0], "validation": [1], "test": [2]}),
        (("main/training 2/a.jsonl", "test.jsonl", "valid/train.jsonl"),
         {"train": [0], "validation": [2]}),
    ],
)  # fmt: skip
def test_splits_are_what_files_are_named_after(hub, files, splits):
    put(hub, *files)
    for split, wanted in splits.items():
        assert names(f"{NAME}?split={split}") == [files[one] for one in wanted]
    several = refusal(NAME)
    assert f"has several splits: {', '.join(splits)}; name one, such as" in several
    assert f"'{NAME}?split={next(iter(splits))}'" in several
    assert "has no split 'spring'; it has" in refusal(f"{NAME}?split=spring")


CONFIGS = [
    {"config_name": "main", "data_files": [{"split": "train", "path": "main/tr*"},
                                           {"split": "test", "path": ["main/te*", "old/*"]}]},
    {"config_name": "hard one", "data_dir": "hard"},
    {"config_name": "all", "data_files": "**/*.jsonl"},
]  # fmt: skip
FILES = ("main/tr1.jsonl", "main/te1.jsonl", "old/a.jsonl", "hard/train.jsonl", "hard/test.jsonl")


def test_the_card_names_configurations_and_their_splits(hub):
    put(hub, *FILES, card={"configs": CONFIGS})
    several = refusal(NAME)
    assert "several configurations: main, hard one, all; name one" in several
    assert f"'{NAME}?config=main&split=train'" in several
    assert "several splits: train, test;" in refusal(f"{NAME}?config=main")
    assert names(f"{NAME}?config=main&split=test") == ["main/te1.jsonl", "old/a.jsonl"]
    assert names(f"{NAME}?split=train&config=hard%20one") == ["hard/train.jsonl"]
    assert names(f"{NAME}?config=all") == sorted(FILES)
    assert "no configuration 'soft'; it has main, hard one, all" in refusal(f"{NAME}?config=soft")


def test_the_configuration_that_is_marked_is_meant(hub):
    put(hub, *FILES, card={"configs": [*CONFIGS[:2], {**CONFIGS[2], "default": True}]})
    assert names(NAME) == sorted(FILES)


def test_tables_that_the_hub_made_have_a_directory_for_each_split(hub):
    put(hub, "main/train/0000.parquet", "main/test/0000.parquet", "hard/train/0000.parquet")
    assert "several configurations: hard, main;" in refusal(NAME)
    assert names(f"{NAME}?config=hard") == ["hard/train/0000.parquet"]


def test_what_cannot_be_asked_for_is_refused(hub):
    put(hub, "data/train.jsonl")
    for uri in ("hf://org/model", "hf://datasets/org", f"{NAME}?spilt=train"):
        assert "it takes hf://datasets/OWNER/NAME[@REVISION][/PATH]" in refusal(uri)
    assert "has a glob and asks for a split" in refusal(f"{NAME}/*.jsonl?split=train")
    assert "data/train.jsonl is no directory" in refusal(f"{NAME}/data/train.jsonl?split=train")
    assert "no such revision" in refusal(f"{NAME}@elsewhere")
    assert "no dataset 'org/answers', or a private one" in refusal("hf://datasets/org/answers")


def test_a_gated_dataset_needs_its_token(tmp_path, hub, monkeypatch):
    put(hub, {"questions.jsonl": lines(1)}, token="mine", is_gated=True)
    refused = refusal(NAME)
    where = f"{hub.address}/datasets/org/questions"
    assert f"no access token is set here: accept its conditions at {where}" in refused
    monkeypatch.setenv("HF_TOKEN", "mine")
    assert open_source(NAME, id_column="id").num_rows == 1


def test_a_hub_that_goes_away_while_files_are_read_is_named(hub):
    put(hub, {"questions.jsonl": lines(1)})
    (file,) = find_files(NAME)
    del hub.models["datasets/org/questions"].files["questions.jsonl"]
    with pytest.raises(ConfigError, match=r"questions.jsonl cannot be read: 404 .*HF_TOKEN"):
        read(file)
    with pytest.raises(ConfigError, match="cannot be read: no route; check the network"):
        lose(file)


def read(file):
    with file.explained("read"):
        file.read_bytes()


def lose(file):
    with file.explained("read"):
        raise HTTPError("no route")


def test_globs_of_cards_are_those_of_fsspec_and_take_no_time():
    chance = random.Random(3)
    parts = ["a", "b", "ab", "*", "?", "a*", "*b", "[ab]", "[!a]", "**"]
    for _ in range(3000):
        glob = "/".join(chance.choices(parts, k=chance.randint(1, 4)))
        name = "/".join(chance.choices(["a", "b", "ab", "ba"], k=chance.randint(1, 4)))
        expected = re.compile(glob_translate(glob)).match(name) is not None
        if not glob.endswith("**"):  # what it means of the directory itself is nobody's question
            assert datasets._fits(name, glob) == expected, (glob, name)
    hostile = "a" * 200
    assert not datasets._fits(hostile, "*a" * 100 + "*b")
    assert not datasets._fits("/".join(hostile), "**/a/" * 60 + "b")

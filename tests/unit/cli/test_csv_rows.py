"""CSV: one row for each, one reason for each bad one, and no row lost behind a bad quote."""

import csv
import gzip
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.cli import csv_rows, sources
from raymoe.cli.csv_rows import CsvRows, read_header
from raymoe.cli.sources import open_source
from raymoe.data.json_lines import Line, read_lines
from raymoe.errors import ConfigError


def lines(text):
    return read_lines(io.BytesIO(text))


def rows(text, separator=","):
    return [(row.cells, row.line, bool(row.error)) for row in CsvRows(lines(text), separator)]


def read(path, content, **options):
    path.write_bytes(content)
    source = open_source(str(path), **({"id_column": None} | options))
    columns = [*source.schema.names, "__input_error__"]
    tables = list(source.tables(columns))
    assert sum(table.num_rows for table in tables) == source.num_rows
    return source, [row for table in tables for row in table.to_pylist()]


def test_a_quote_that_is_never_closed_costs_its_row_only():
    text = b'1,"a\n2,"b"\n3,c\n4,"d\n'
    assert rows(text) == [([], 1, True), (["2", "b"], 2, False), (["3", "c"], 3, False),
                          ([], 4, True)]  # fmt: skip


def test_rows_of_several_lines_and_blank_lines_keep_their_numbers():
    text = b'1,"a\r\nb"\r\n\r\n2,"say ""x"""\n'
    assert rows(text) == [(["1", "a\r\nb"], 1, False), ([], 3, False), (["2", 'say "x"'], 4, False)]


def test_a_row_that_is_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(csv_rows, "MAX_ROW_BYTES", 20)
    text = b'1,"' + b"a\n" * 30 + b'"\n2,b\n'
    found = rows(text)
    assert found[0] == ([], 1, True)
    assert found[-1] == (["2", "b"], 32, False)


@pytest.mark.parametrize("line", [b'x","y\n', b'1,"a\n', b'"",""\n', b'a"",""""\n', b'"\n'])
def test_each_line_is_parsed_three_times_at_most_wherever_quotes_are_open(line, monkeypatch):
    """The first is read by each row that begins before the end that it looks for, if all are."""
    parsed, parse = [], CsvRows._parse

    def count(self, texts):
        parsed.extend(texts := list(texts))
        return parse(self, texts)

    monkeypatch.setattr(CsvRows, "_parse", count)
    assert sum(row.num_lines for row in CsvRows(lines(line * 500), ",")) == 500
    assert len(parsed) <= 4 * 500  # with a quote before each that is in one


def test_a_line_that_is_too_long_is_given_up_and_ends_no_other_row():
    given = [Line(one, size) for one, size in ((b'1,"a\n', 5), (b"b" * 9, 99), (b'2,"b"\n', 6))]
    found = [(row.cells, row.line, row.error[:20], row.num_bytes) for row in CsvRows(given, ",")]
    assert found == [([], 1, "a quote is not close", 5), ([], 2, "the line has 99 byte", 99),
                     (["2", "b"], 3, "", 6)]  # fmt: skip
    with pytest.raises(ConfigError, match="the header of x has 4,001 columns"):
        read_header(lines(b",".join(b"%d" % one for one in range(4001))), ",", where="x")


def test_a_row_of_too_many_lines_is_given_up(monkeypatch):
    monkeypatch.setattr(csv_rows, "MAX_ROW_LINES", 3)
    assert rows(b'1,"a\nb\nc"\n2,"a\nb\nb\nc\nd"\n') == [
        (["1", "a\nb\nc"], 1, False), ([], 4, True), (["b"], 5, False), (["b"], 6, False),
        (["c"], 7, False), (['d"'], 8, False),
    ]  # fmt: skip


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.text(max_size=6), min_size=2, max_size=2), max_size=8))
def test_what_python_writes_is_read_back(table):
    file = io.StringIO(newline="")
    csv.writer(file).writerows(table)
    try:
        data = file.getvalue().encode()
    except UnicodeEncodeError:
        return
    found = list(CsvRows(lines(data), ","))
    assert [row.cells for row in found if row.has_content] == table
    assert sum(row.num_bytes for row in found) == len(data)


@pytest.mark.parametrize(
    ("line", "separator", "names"),
    [
        (b"a,b\n", ",", ("a", "b")),
        (b"a;b\r\n", ",", ("a", "b")),
        (b"a\tb\n", ",", ("a", "b")),
        (b"a;b, c\n", ",", ("a;b", "c")),
        (b"a,b\tc\n", "\t", ("a,b", "c")),
        (b"\xef\xbb\xbf\"a\",b\n", ",", ("a", "b")),
        (b",id\n", ",", ("column_1", "id")),
    ],
)  # fmt: skip
def test_the_first_line_names_the_columns(line, separator, names):
    header = read_header(lines(b"\n" + line + b"1,2\n"), separator, where="x")
    assert header.names == names
    assert (header.num_bytes, header.line) == (1 + len(line), 3)


def test_names_that_repeat_are_refused():
    with pytest.raises(ConfigError, match="the header of x has 'a' more than once"):
        read_header(lines(b"a,a\n"), ",", where="x")
    assert read_header(lines(b"\n"), ",", where="x") is None


MESSY = b'id,prompt\n1,a\n2,b,c\n\n3,\n4,"d\nd"\n5,"e\n6,\xff\n7,"f"\n'


@pytest.mark.parametrize("split_rows", [1, 2, 1000])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_bad_rows_of_a_file_are_rows_with_a_reason_and_a_place(
    tmp_path, monkeypatch, split_rows, is_compressed
):
    monkeypatch.setattr(sources, "SPLIT_ROWS", split_rows)
    path = tmp_path / ("a.csv.gz" if is_compressed else "a.csv")
    source, found = read(path, gzip.compress(MESSY) if is_compressed else MESSY)
    assert [(row["id"], row["prompt"]) for row in found] == [
        ("1", "a"), (None, None), ("3", None), ("4", "d\nd"), (None, None), ("6", "\ufffd"),
        ("7", "f"),
    ]  # fmt: skip
    errors = [row["__input_error__"] for row in found]
    assert [bool(error) for error in errors] == [False, True, False, False, True, True, False]
    assert errors[1] == f"the row has 3 cells, the header 2: '2,b,c' ({path}, line 3)"
    assert errors[4].endswith(f"""a quote is not closed, or text follows a closed one, in '5,"e' \
({path}, line 8)""")
    assert errors[5] == f"the row is not UTF-8 ({path}, line 9)"
    assert len(source.splits) == 1 if is_compressed else len(source.splits) == -(-7 // split_rows)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("limit", [1, 2, 5, 7, 100])
def test_a_limit_takes_the_first_rows_broken_ones_included(tmp_path, monkeypatch, name, limit):
    monkeypatch.setattr(sources, "SPLIT_ROWS", 3)
    content = gzip.compress(MESSY) if name.endswith("gz") else MESSY
    _, every = read(tmp_path / name, content)
    _, first = read(tmp_path / name, content, limit=limit)
    assert first == every[:limit]


def test_files_with_other_columns_and_separators_are_one_table(tmp_path):
    (tmp_path / "a.csv").write_text("id,prompt\n1,a\n")
    (tmp_path / "b.csv").write_text("prompt;more\nb;c\n")
    (tmp_path / "c.CSV").write_text("")
    (tmp_path / "d.tsv").write_text("id\tprompt\n2\td,d\n")
    source = open_source(str(tmp_path), id_column=None)
    found = [row for table in source.tables(source.schema.names) for row in table.to_pylist()]
    assert found == [
        {"id": "1", "prompt": "a", "more": None},
        {"id": None, "prompt": "b", "more": "c"},
        {"id": "2", "prompt": "d,d", "more": None},
    ]


def test_ids_of_csv_are_text_and_every_row_needs_its_own(tmp_path):
    source, _ = read(tmp_path / "a.csv", b"id,prompt\n007,a\nbroken\n8,b\n", id_column="id")
    assert source.ids.to_pylist() == ["007", "8"]
    with pytest.raises(ConfigError, match="has no id in 1 rows"):
        read(tmp_path / "a.csv", b"id,prompt\n,a\n", id_column="id")
    with pytest.raises(ConfigError, match=r"no header has 'key' \(--id-column\); it has id"):
        read(tmp_path / "a.csv", b"id,prompt\n1,a\n", id_column="key")


def test_files_that_are_no_csv_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is empty; the first line of CSV names"):
        read(tmp_path / "a.csv", b"\n")
    with pytest.raises(ConfigError, match="is text in UTF-16; convert it"):
        read(tmp_path / "a.csv", "id,prompt\n".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"the header of .* cannot be read: a quote"):
        read(tmp_path / "a.csv", b'"id\n')
    with pytest.raises(ConfigError, match=r"a\.csv\.gz cannot be read"):
        read(tmp_path / "a.csv.gz", b"id,prompt\n")

"""Prompt templates: columns to prompts or chats, and a reason for each row that has none."""

import json

import pyarrow as pa
import pytest

from raymoe.assets import demo_model_path
from raymoe.data import prompt_template
from raymoe.data.prompt_template import PromptTemplate, read_template
from raymoe.errors import ConfigError, UnknownOptionError

TABLE = {"title": ["Tea", None, "Ink"], "stars": [3, 4, None], "tags": [["a", "b"], [], None]}


def rendered(prompt=None, system=None, columns=None, **options):
    table = pa.table(TABLE if columns is None else columns)
    template = PromptTemplate(prompt=prompt, system=system, **options)
    template.check(table.column_names)
    made = template.apply(table)
    cells = made.column(template.output_column).to_pylist()
    return cells, made.column("__input_error__").to_pylist()


def test_a_template_makes_a_prompt_of_each_row_and_an_error_where_null_is_written():
    prompts, errors = rendered("{{ title }}: {{ stars }}")
    assert prompts == ["Tea: 3", None, None]
    assert errors == [
        "",
        "prompt_template: column 'title' is null",
        "prompt_template: column 'stars' is null",
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ title or 'no title' }}", ["Tea", "no title", "Ink"]),
        ("{{ title | default('-') }}", ["Tea", "-", "Ink"]),
        ("x{% if title %} {{ title }}{% endif %}", ["x Tea", "x", "x Ink"]),
        ("{{ 1 if title is none else 2 }}", ["2", "1", "2"]),
        ("{{ title == 'Tea' }}", ["True", "False", "False"]),
        ("{% for tag in tags or [] %}{{ tag }},{% endfor %}.", ["a,b,.", ".", "."]),
        ("{{ {'t': title} | tojson }}", ['{"t": "Tea"}', '{"t": null}', '{"t": "Ink"}']),
        ("{{ row['title'] or 0 }}", ["Tea", "0", "Ink"]),
        ("{{ row | length }}", ["3", "3", "3"]),
        ("{% if true %}\n  a\n{% endif %}\nb\n", ["  a\nb"] * 3),
        ("{{ '<é>' | tojson }}", ['"<é>"'] * 3),
    ],
)
def test_null_is_false_and_none_and_white_space_is_that_of_chat_templates(source, expected):
    assert rendered(source) == (expected, ["", "", ""])


def test_null_is_never_written_by_a_filter_or_inside_of_a_value():
    columns = {"title": [None], "place": [{"city": None}], "tags": [["a", None]]}
    for source in ("{{ title | upper }}", "{{ title ~ 'x' }}", "{{ place.city }}", "{{ tags[1] }}",
                   "{{ tags | join }}"):  # fmt: skip
        (prompt,), (error,) = rendered(source, columns=columns)
        assert prompt is None
        assert "is null" in error
    for source in ("{{ none }}", "{{ row.get('x') }}", "{{ title or none }}"):
        (prompt,), (error,) = rendered(source, columns=columns)
        assert (prompt, error) == (
            None,
            "prompt_template: an expression that is written gives none",
        )


def test_a_system_prompt_makes_chats_of_prompts_and_of_chats():
    chats, errors = rendered("{{ title }}", "Be {{ row['how is'] }}.", columns={
        "title": ["Tea", "Ink"], "how is": ["kind", None]})  # fmt: skip
    assert json.loads(chats[0]) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Tea"},
    ]
    assert errors[1] == "system_prompt: column 'how is' is null"

    said = [{"role": "user", "content": "hi"}]
    columns = {
        "prompt": ["a", None, None, None, "b"],
        "messages": [None, json.dumps(said), '[{"role": "system", "content": "x"}]', None, "[]"],
    }
    chats, errors = rendered(system="Be kind.", columns=columns)
    assert [json.loads(chat)[1] for chat in chats[:2]] == [{"role": "user", "content": "a"}, *said]
    assert "has a system message, and so has the job" in errors[2]
    assert errors[3] == "column 'prompt' is null"
    assert "a row takes one of them" in errors[4]
    chats, _ = rendered(system="", columns=columns)
    assert json.loads(chats[0]) == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ titel }}", "unknown column in prompt_template 'titel'; did you mean 'title'"),
        ("{{ row['titel'] }}", "did you mean 'title'"),
        ("{{ body }}", "known: stars, tags, title"),
        ("a\n{{ title", "prompt_template is no Jinja template: line 2"),
        ("{{ title | random }}", "No filter named 'random'"),
    ],
)
def test_a_template_that_no_row_can_have_is_refused_at_once(source, reason):
    with pytest.raises(ConfigError) as caught:
        rendered(source)
    assert reason in str(caught.value)


def test_a_column_that_would_be_replaced_or_is_missing_is_refused():
    with pytest.raises(ConfigError, match="the input has a column 'rendered_prompt'"):
        rendered("a", columns={"rendered_prompt": ["x"]})
    with pytest.raises(ConfigError, match="neither column 'prompt' nor 'messages' exists"):
        rendered(system="Be kind.")
    with pytest.raises(UnknownOptionError):
        rendered("{{ dict_ }}")


def test_a_model_without_a_chat_template_gets_no_chats(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"makes chats, and {tmp_path.name} has no chat template"):
        PromptTemplate(system="s").check_model(tmp_path)
    PromptTemplate(prompt="s").check_model(tmp_path)
    PromptTemplate(system="s").check_model(demo_model_path())
    PromptTemplate(system="s").check_model("somebody/model-of-the-hub")


def test_cells_are_data_and_never_templates():
    prompts, _ = rendered("{{ title }}", columns={"title": ["{{ 7 * 7 }}", "{% raw %}"]})
    assert prompts == ["{{ 7 * 7 }}", "{% raw %}"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ title.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ tags.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{% set n = namespace(__init__=1) %}{{ n }}",
        "{{ '{0.__class__}'.format(title) }}",
    ],
)
def test_the_sandbox_keeps_templates_from_python(source):
    (prompt, *_), (error, *_) = rendered(source)
    assert prompt is None
    assert "SecurityError" in error or "no attribute" in error or "undefined" in error


def test_a_slow_row_is_an_error_of_its_own(monkeypatch):
    monkeypatch.setattr(prompt_template, "ROW_LIMIT_S", 0.3)
    slow = "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}done"
    prompts, errors = rendered(slow, columns={"n": [2, 100_000, 3]})
    assert prompts == ["done", None, "done"]
    assert "took more than 0.3 s of CPU time" in errors[1]


def test_cells_that_cannot_be_read_and_texts_that_cannot_be_written_are_errors():
    deep = ("[" * 200) + ("]" * 200)
    columns = {"title": ["a", "\ud800".encode("utf-8", "surrogatepass"), deep, ""]}
    columns["title"] = pa.array([b"a", b"\xff", deep.encode(), b""])
    options = {"json_columns": frozenset()}
    prompts, errors = rendered("{{ title }}", columns=columns, **options)
    assert prompts == ["a", None, deep, None]
    assert "not UTF-8" in errors[1]
    assert errors[3] == "prompt_template: the prompt is empty"


def test_rows_with_an_error_keep_it_and_values_of_json_columns_are_seen():
    columns = {
        "tags": ['["a"]', None, '{"b": 2}'],
        "__input_error__": ["", "the line is not JSON", None],
    }
    json_columns = frozenset({"tags"})
    prompts, errors = rendered("{{ tags | first }}", columns=columns, json_columns=json_columns)
    assert prompts == ["a", None, "b"]
    assert errors == ["", "the line is not JSON", ""]


def test_a_block_without_a_column_has_null_there():
    template = PromptTemplate(prompt="{{ title or '' }}{{ text }}")
    made = template.apply(pa.table({"text": ["a"]}))
    assert made.column("rendered_prompt").to_pylist() == ["a"]


def test_an_empty_table_gets_its_columns():
    template = PromptTemplate(prompt="{{ title }}")
    made = template.apply(pa.table({"title": pa.array([], pa.string())}))
    assert made.column_names == ["title", "rendered_prompt", "__input_error__"]


def test_a_template_is_text_or_a_file(tmp_path):
    path = tmp_path / "p.jinja"
    path.write_text("{{ title }}\n")
    assert read_template(f"@{path}", "prompt_template") == "{{ title }}\n"
    with pytest.raises(ConfigError, match="did you mean '@"):
        read_template(str(path), "prompt_template")
    with pytest.raises(ConfigError, match=r"prompt_template .*cannot be read"):
        read_template("@/nowhere/x", "prompt_template")
    with pytest.raises(ConfigError, match="system_prompt is a int; it takes text"):
        PromptTemplate.of({"system_prompt": 3})

"""One schema for the files of a table, and their rows in it.

Writers choose types by what a file happens to hold: a column that is null throughout, numbers of
another width, dictionaries, views. What follows would see another table in each file, or fail in
the middle of a job.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from raymoe.errors import ConfigError

_LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_),
    (pa.types.is_large_list_view, pa.large_list),
)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that holds the same values without dictionaries, views and run lengths.

    A uuid is its text, and so is what Arrow knows as JSON. Other extension types are as they were.
    """
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if kind in (pa.string_view(), pa.uuid()) or isinstance(kind, pa.JsonType):
        return pa.string()
    if kind == pa.binary_view():
        return pa.binary()
    return _plain_nested(kind)


def _plain_nested(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(kind.field(i)) for i in range(kind.num_fields)])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    make = next((make for is_kind, make in _LISTS if is_kind(kind)), None)
    return kind if make is None else make(_plain_field(kind.value_field))


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type)).with_nullable(True)


def unify(schemas: Mapping[str, pa.Schema]) -> pa.Schema:
    """Return one schema with the columns of all files, in plain types that hold all values.

    Args:
        schemas: By the names of files; at least one.

    Raises:
        ConfigError: A column is of types in two files that no type holds.
    """
    unified: pa.Schema | None = None
    for name, schema in schemas.items():
        plain = pa.schema([_plain_field(field) for field in schema], schema.metadata)
        if unified is None:
            unified, first = plain, name
            _check_names(plain, name)
        elif not plain.equals(unified):
            _check_names(plain, name)
            unified = _merged(unified, plain, first, name)
    assert unified is not None
    return unified


def _check_names(schema: pa.Schema, file: str) -> None:
    repeated = [name for name in schema.names if schema.names.count(name) > 1]
    if repeated:
        raise ConfigError(f"{file} has {repeated[0]!r} more than once; rename one of its columns")


def _merged(before: pa.Schema, more: pa.Schema, first: str, file: str) -> pa.Schema:
    fields = {field.name: field for field in before}
    for field in more:
        known = fields.get(field.name, field)
        # Arrow takes uint64 and int64 for int64, and fails at the values that it does not hold.
        if {known.type, field.type} == {pa.uint64(), pa.int64()}:
            raise _no_common_type(known, field, first, file)
        try:
            merged = pa.unify_schemas(
                [pa.schema([known]), pa.schema([field])], promote_options="permissive"
            )
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise _no_common_type(known, field, first, file) from error
        fields[field.name] = merged.field(0)
    return pa.schema(list(fields.values()), before.metadata)


def _no_common_type(known: pa.Field, field: pa.Field, first: str, file: str) -> ConfigError:
    return ConfigError(
        f"column {field.name!r} is {field.type} in {file} and {known.type} in {first} or a file "
        "after it; write it with one type, or name files of one kind by a glob"
    )


def conform(batch: pa.RecordBatch | pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the rows with all columns of the schema; null where they have none.

    Raises:
        ConfigError: The type of a column cannot hold a value.
    """
    names = batch.schema.names
    arrays = []
    for field in schema:
        if field.name not in names:
            arrays.append(pa.nulls(batch.num_rows, field.type))
            continue
        try:
            arrays.append(_cast(batch.column(field.name), field.type))
        except pa.ArrowException as error:
            raise ConfigError(
                f"column {field.name!r} has a value that {field.type} of other files cannot "
                f"hold: {error}"
            ) from error
    return pa.Table.from_arrays(arrays, schema=schema)


def _cast(array: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if array.type.equals(kind):
        return array
    if pa.types.is_run_end_encoded(array.type):
        return _cast(pc.run_end_decode(array), kind)
    if array.type == pa.uuid():
        return _texts(array, kind)
    if pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        return pa.array(array.to_pylist(), kind)  # Arrow's cast of views in them is invalid
    try:
        return array.cast(kind)
    except pa.ArrowNotImplementedError:  # such as of views in dictionaries
        return pa.array(array.to_pylist(), kind)


def _texts(array: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    values = array.to_pylist()
    return pa.array([None if value is None else str(value) for value in values], kind)


def check_id_type(kind: pa.DataType, id_column: str, where: Sequence[object]) -> None:
    """Refuse ids that no output keeps such that a resumed job finds them.

    Raises:
        ConfigError: They are neither text, numbers, times, bytes nor booleans.
    """
    is_bad = pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType)
    if is_bad or pa.types.is_interval(kind):
        raise ConfigError(
            f"column {id_column!r} of {where[0]} is {kind}, which cannot identify rows "
            "(--id-column); write it as text or whole numbers"
        )


def check_id_of_lines(kind: pa.DataType, id_column: str) -> None:
    """Refuse ids that JSON lines hold as text of which a resumed job cannot make them again.

    Raises:
        ConfigError: They are neither text, numbers nor booleans.
    """
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not (is_text or is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise ConfigError(
            f"column {id_column!r} (--id-column) is {kind}, which JSON lines cannot hold; write "
            "parquet, by an --output that does not end in .jsonl, or make the ids text"
        )

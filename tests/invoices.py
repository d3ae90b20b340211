"""Invoices: a schema with nested lists, optional fields and enums, whose texts always end."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Name = Annotated[str, Field(max_length=8, pattern="^[a-z]+$")]
Amount = Annotated[float, Field(ge=0, le=1000, multiple_of=0.01)]


class Item(BaseModel):
    name: Name
    price: Amount
    count: Annotated[int, Field(ge=1, le=99)] = 1
    tags: Annotated[list[Literal["new", "used"]], Field(max_length=2)]


class Invoice(BaseModel):
    number: Annotated[int, Field(ge=0, le=9999)]
    currency: Literal["EUR", "USD"]
    customer: Name | None
    note: Name | None = None
    paid: bool
    items: Annotated[list[Item], Field(min_length=1, max_length=3)]


# The same in Arrow's words.
ARROW = (
    "struct<number: int64 not null, currency: string not null, customer: string, note: string, "
    "paid: bool not null, items: list<item: struct<name: string not null, price: double not null, "
    "count: int64, tags: list<item: string not null> not null> not null> not null>"
)

"""Lists in pages, as OpenAI's API gives them: the newest first, `after` a name, `has_more`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import sqlalchemy as sa

from etude.server.errors import ApiError

Row: TypeAlias = dict[str, Any]
Order: TypeAlias = Literal["asc", "desc"]


def page_of(
    engine: sa.Engine,
    table: sa.Table,
    *conditions: sa.ColumnElement[bool],
    after: str | None,
    limit: int,
    order: Order = "desc",
) -> tuple[list[Row], bool]:
    """Up to `limit` rows, and whether there are more. Raises ApiError when there is no row `after`."""
    newest_first = order == "desc"
    query = sa.select(table).where(*conditions)
    with engine.connect() as connection:
        if after is not None:
            found = connection.execute(sa.select(table.c.number).where(table.c.id == after)).scalar()
            if found is None:
                raise ApiError(
                    400, f"there is no {after!r} to go on after", param="after", code="invalid_value"
                )
            query = query.where(table.c.number < found if newest_first else table.c.number > found)
        ordered = query.order_by(table.c.number.desc() if newest_first else table.c.number)
        rows = [dict(row) for row in connection.execute(ordered.limit(limit + 1)).mappings()]
    return rows[:limit], len(rows) > limit


def list_object(data: list[Row], has_more: bool) -> Row:
    """The list object of a page."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": has_more, "first_id": None, "last_id": None} | ends

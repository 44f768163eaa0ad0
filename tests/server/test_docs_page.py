"""`/docs`: the routes on a page that fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import re

from fastapi import FastAPI
from pydantic import BaseModel, Field

from etude.server.docs_page import docs_page


class Body(BaseModel):
    """A request."""

    model: str = Field(description="Which <one>.")
    temperature: float | None = Field(default=None, description="How warm.")


def test_every_route_is_there_with_its_fields_and_nothing_is_fetched():
    app = FastAPI(title="etude", version="9", description="It serves.", docs_url=None)

    @app.post("/v1/things/{id}", summary="Make a thing", tags=["things"])
    def make(id: str, body: Body) -> None:
        """It is made."""

    page = docs_page(app.openapi())
    text = page.body.decode()
    for part in ("etude 9", "It serves.", "<h2>things</h2>", "POST", "/v1/things/{id}", "Make a thing",
                 "It is made.", "Required. Which &lt;one&gt;.", "number or null", "How warm."):  # fmt: skip
        assert part in text
    style = re.search(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = page.headers["content-security-policy"]
    assert f"'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "<script" not in text and "http" not in text

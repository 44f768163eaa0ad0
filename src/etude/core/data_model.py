"""The base of the values that interfaces pass around, and that a user's code makes, reads and changes."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from etude.core.example import text_id
from etude.core.numbers import number

OWN_COPIES = ConfigDict(revalidate_instances="always")
"""For values that whoever made them may go on to change: what holds one has a copy."""


class DataModel(BaseModel):
    """Fields may be assigned, and are checked then as when the value is made. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a field. Raises ValidationError, and leaves the value as it was, when it does not fit."""
        before, fields_set = dict(self.__dict__), set(self.__pydantic_fields_set__)
        try:
            super().__setattr__(name, value)
        except ValidationError:
            # Checks of the whole model run after the field is set.
            object.__setattr__(self, "__dict__", before)
            object.__setattr__(self, "__pydantic_fields_set__", fields_set)
            raise


Id: TypeAlias = Annotated[str, BeforeValidator(text_id)]
"""The id of an example, always text: `1` becomes `"1"`."""

Number: TypeAlias = Annotated[float, BeforeValidator(number)]
"""Any kind of number that `number` takes, as a float."""

"""The base class of the values that interfaces pass around, and the numbers and ids in them."""

import math
import numbers
from decimal import Decimal
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ValidationError


class DataModel(BaseModel, extra="forbid", validate_assignment=True):
    """A value whose fields can be assigned, and are validated again on assignment. Unknown fields are errors.

    A subclass sets `revalidate_instances="always"` if its values may change after they are passed on. A model
    that has such a value as a field then stores a copy.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a field. Raises ValidationError and keeps the old value if the new one is not valid."""
        before, fields_set = dict(self.__dict__), set(self.__pydantic_fields_set__)
        try:
            super().__setattr__(name, value)
        except ValidationError:
            # pydantic checks the whole model only after it has set the field.
            object.__setattr__(self, "__dict__", before)
            object.__setattr__(self, "__pydantic_fields_set__", fields_set)
            raise


def list_faults(error: ValidationError) -> str:
    """Return the first of pydantic's errors in each field, as `field: what is wrong, found value; …`."""
    told: dict[Any, str] = {}
    for fault in error.errors(include_url=False):
        where, text = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
        told.setdefault(fault["loc"][:1], f"{where}: {text}, found {fault['input']!r:.80}" if where else text)
    return "; ".join(told.values())


def text_id(value: Any) -> str:
    """Return an id as text, so that 1 and "1" are one id. Raises ValueError for values that name nothing,
    such as None, and for half of a surrogate pair."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"an id is text of whole characters, found {value!r:.80}") from None
        return str(value)
    if value is None or isinstance(value, bool | dict | list | tuple | set | bytes):
        raise ValueError(f"an id is text or a whole number, found {value!r:.80}")
    return str(value)


def number(value: Any) -> float:
    """Return a bool, real number, Decimal, or array or tensor without dimensions as a float. Raises
    ValueError, which names the value found, for all others, such as text and what is too large for a
    float."""
    if type(value) is float:
        return value
    if not isinstance(value, numbers.Real | Decimal):
        if getattr(value, "ndim", None) != 0 or not callable(getattr(value, "item", None)):
            raise ValueError(f"a number is expected, found {name_type(value)}")
        inner = value.item()
        if not isinstance(inner, numbers.Real | Decimal):
            raise ValueError(f"a number is expected, found {name_type(value)} of {name_type(inner)}")
        value = inner
    try:
        return float(value)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"a number is expected, found {name_type(value)}: {error}") from None


def name_type(value: Any) -> str:
    """Return `None`, or the type with its article and an array's shape: `an ndarray of shape (2,)`."""
    if value is None:
        return "None"
    name = type(value).__qualname__
    article = "an" if name[0].lower() in "aeiou" or name == "ndarray" else "a"
    shape = getattr(value, "shape", None)
    return f"{article} {name}" + (f" of shape {tuple(shape)}" if isinstance(shape, tuple) and shape else "")


def finite(value: Any) -> Any:
    """Return the value as strict JSON data: numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((finite(item) for item in value), key=str)
    return value


Id: TypeAlias = Annotated[str, BeforeValidator(text_id)]
"""The id of an example, always text: `1` becomes `"1"`."""

Number: TypeAlias = Annotated[float, BeforeValidator(number)]
"""Any kind of number that `number` accepts, as a float."""

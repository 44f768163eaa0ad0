"""The base of the values that interfaces pass around, and the numbers that user code puts in them."""

import math
import numbers
from decimal import Decimal
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ValidationError


class DataModel(BaseModel, extra="forbid", validate_assignment=True):
    """Fields may be assigned, and are checked then as when the value is made. Unknown fields are errors.

    A subclass whose values the one who made them may go on to change has `revalidate_instances="always"`:
    what holds such a value has a copy of it.
    """

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


def text_id(value: Any) -> str:
    """An id as text: a number, a UUID and the like by their text, so that 1 and "1" are one id.

    Raises ValueError for what names nothing, such as None, and for half of a surrogate pair.
    """
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
    """A bool, any real number, a Decimal, or an array or tensor without dimensions, as a float.

    Raises ValueError, naming what came, for everything else, text that looks like a number included,
    and for what is too large for a float.
    """
    if type(value) is float:
        return value
    if not isinstance(value, numbers.Real | Decimal):
        if getattr(value, "ndim", None) != 0 or not callable(getattr(value, "item", None)):
            raise ValueError(f"a number is expected, found {kind_of(value)}")
        inner = value.item()
        if not isinstance(inner, numbers.Real | Decimal):
            raise ValueError(f"a number is expected, found {kind_of(value)} of {kind_of(inner)}")
        value = inner
    try:
        return float(value)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"a number is expected, found {value!r:.40}: {error}") from None


def kind_of(value: Any) -> str:
    """`None`, or the type with its article, and the shape of an array: `an ndarray of shape (2,)`."""
    if value is None:
        return "None"
    name = type(value).__qualname__
    article = "an" if name[0].lower() in "aeiou" or name == "ndarray" else "a"
    shape = getattr(value, "shape", None)
    return f"{article} {name}" + (f" of shape {tuple(shape)}" if isinstance(shape, tuple) and shape else "")


def finite(value: Any) -> Any:
    """The value as JSON that every reader takes: numbers that are not finite become None."""
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
"""Any kind of number that `number` takes, as a float."""

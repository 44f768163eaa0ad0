"""A griffe extension for what calls make: `train = blocking(train_async)` is documented as a function."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Made(griffe.Extension):
    """Documents the functions that `blocking` makes, and the decorators that register components."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Change attributes of a module that was read."""
        for name, attribute in list(mod.attributes.items()):
            call = None if attribute.is_alias else attribute.value
            if not isinstance(call, griffe.ExprCall):
                continue
            if str(call.function) == "blocking":
                work = mod.functions[str(call.arguments[0])]
                function = griffe.Function(name, parameters=work.parameters, returns=work.returns)
                function.docstring = work.docstring
                mod.set_member(name, function)
            elif str(call.function) == "Decorator":
                yields = ast.literal_eval(str(call.arguments[2]))
                text = f"Decorates an async generator `f(config, builder)` that yields {yields}."
                attribute.docstring = griffe.Docstring(text, parent=attribute)

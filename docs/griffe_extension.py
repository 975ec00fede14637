"""What the reference shows of signatures: the values of defaults, and the choices behind names of types."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import griffe

from lit_ort import ORTOptions

OPTIONS = "lit_ort.options.ORTOptions"
CHOICES = "lit_ort.strategies.arguments"


class Signatures(griffe.Extension):
    """Replaces names that only readers of the code can resolve."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """`_of_the_run("warn")`, the default of an option, is shown as `'warn'`."""
        if cls.path == OPTIONS:
            for field in dataclasses.fields(ORTOptions):
                cls.members[field.name].value = repr(field.default)  # pyright: ignore[reportAttributeAccessIssue]

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """`Fallback`, the type of an argument, is shown as `Literal["warn", "error"]`."""
        attributes = pkg[CHOICES.partition(".")[2]].attributes
        choices = {name: str(attribute.value) for name, attribute in attributes.items() if not name.isupper()}
        names = re.compile(rf"\b({'|'.join(choices)})\b")
        for file in pkg["strategies"].modules.values():
            for function in _initializers(file):
                for parameter in function.parameters:
                    annotation = str(parameter.annotation)
                    if names.search(annotation):
                        parameter.annotation = names.sub(lambda name: choices[name[1]], annotation)


def _initializers(module: griffe.Module) -> list[griffe.Function]:
    return [cls.members["__init__"] for cls in module.classes.values() if "__init__" in cls.members]  # pyright: ignore

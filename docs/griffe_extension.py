"""What the reference shows of signatures: the values of defaults, and the choices behind names of types."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import griffe

from lit_ort import ORTOptions

OPTIONS = "lit_ort.options.ORTOptions"
# The modules with names for types, such as `Fallback`.
CHOICES = ("options", "strategies.arguments")


class Signatures(griffe.Extension):
    """Replaces names that only readers of the code can resolve."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """`_of_the_run("warn")`, the default of an option, is shown as `'warn'`."""
        if cls.path == OPTIONS:
            for field in dataclasses.fields(ORTOptions):
                cls.members[field.name].value = repr(field.default)  # pyright: ignore[reportAttributeAccessIssue]

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """`Fallback`, the type of an argument, is shown as `Literal["warn", "error"]`."""
        attributes = [attribute for name in CHOICES for attribute in pkg[name].attributes.values()]
        choices = {one.name: str(one.value) for one in attributes if str(one.value).startswith("Literal")}
        names = re.compile(rf"\b({'|'.join(choices)})\b")
        for shown in _annotated(pkg):
            annotation = str(shown.annotation)
            if names.search(annotation):
                shown.annotation = names.sub(lambda name: choices[name[1]], annotation)


def _annotated(pkg: griffe.Module) -> Iterator[Any]:
    """The attributes of options, and the parameters of strategies."""
    for module in CHOICES:
        for cls in pkg[module].classes.values():
            yield from cls.attributes.values()
    for file in pkg["strategies"].modules.values():
        for cls in file.classes.values():
            if "__init__" in cls.members:
                yield from cls.members["__init__"].parameters  # pyright: ignore[reportAttributeAccessIssue]

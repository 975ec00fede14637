"""Long fields of CSV files."""

from __future__ import annotations

import csv


def allow_long_fields(text: str) -> None:
    """Lets the csv module read a field that is as long as this text. Its own limit is 131,072 characters."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))

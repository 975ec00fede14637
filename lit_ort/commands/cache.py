"""Lists or clears the folder of `cache_dir`.

lit-ort cache list DIR
lit-ort cache clear DIR
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lit_ort.backend.cache.entry import UnusableEntry, summary
from lit_ort.backend.cache.measured_steps import decoded
from lit_ort.backend.cache.store import MEASURED_SUFFIX, own_files


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="lit-ort cache", description="Lists or clears the folder of cache_dir.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the compiled graphs and measured steps with their size and age")
    commands.add_parser("clear", help="remove all compiled graphs and measured steps, and no other files")
    for command in commands.choices.values():
        command.add_argument("dir", type=Path)
    args = parser.parse_args(arguments)
    folder = args.dir.expanduser()
    if not folder.is_dir():
        sys.exit(f"error: {folder} is not a folder. Pass the folder of cache_dir.")
    print("\n".join(listed(folder)) if args.command == "list" else clear(folder))


def listed(folder: Path) -> list[str]:
    """One line per entry, the latest first, and a line with the total."""
    entries = sorted(((path.stat(), path) for path in own_files(folder)), key=lambda entry: -entry[0].st_mtime)
    lines = [
        f"{path.name[:12]}  {_size(stat.st_size):>9}  {_age(time.time() - stat.st_mtime):>8}  {_content(path)}"
        for stat, path in entries
    ]
    return [*lines, f"{_counts([path for _, path in entries])}, {_size(sum(stat.st_size for stat, _ in entries))}"]


def clear(folder: Path) -> str:
    """Removes the files that a cache wrote to a folder. Other files and the folder stay."""
    files = list(own_files(folder))
    size = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink(missing_ok=True)
    others = sum(1 for _ in folder.iterdir())
    kept = f"; kept {others} other files" if others else ""
    return f"removed {_counts(files)}, {_size(size)}{kept}"


def _counts(files: Sequence[Path]) -> str:
    steps = sum(map(_is_step, files))
    measured = f", {steps} measured step{'' if steps == 1 else 's'}" if steps else ""
    graphs = len(files) - steps
    return f"{graphs} graph{'' if graphs == 1 else 's'}{measured}"


def _is_step(path: Path) -> bool:
    return path.suffix == MEASURED_SUFFIX


def _content(path: Path) -> str:
    try:
        data = path.read_bytes()
        if not _is_step(path):
            return summary(data)
        name, step = decoded(data)
        return f"{name}: {step.eager * 1e3:.1f} ms a call in eager, {step.compiled * 1e3:.1f} ms compiled"
    except (OSError, UnusableEntry, ValueError) as error:
        return f"unusable: {error}"


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

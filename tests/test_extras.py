"""The command that installs an extra."""

from __future__ import annotations

import pytest

from lit_ort.extras import install_command


def test_the_command_names_the_packages_of_the_extra() -> None:
    assert install_command("export").startswith("pip install 'onnxscript")
    command = install_command("tasks")
    assert "hydra-core" in command
    assert "'torch<" not in command  # of the core
    assert "'jsonargparse[signatures]<" in install_command("examples")


def test_an_unknown_extra() -> None:
    with pytest.raises(ValueError, match="extra='task': lit_ort has no extra"):
        install_command("task")

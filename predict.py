"""Predicts with an exported model: `python predict.py --help` shows the options."""

import sys
from pathlib import Path

# Works without an installation of this project, with onnxruntime and tokenizers alone.
sys.path.insert(0, str(Path(__file__).with_name("tasks")))

from lit_ort_tasks.commands.predict import main

if __name__ == "__main__":
    main()

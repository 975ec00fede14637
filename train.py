"""Trains one model: `python train.py --help` shows the options."""

from lit_ort_tasks.commands.train import main

if __name__ == "__main__":
    main()

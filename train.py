"""Trains one model: `python train.py --help` says more."""

from lit_ort_tasks.commands.train import main

if __name__ == "__main__":
    main()

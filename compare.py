"""Trains one model with several strategies: `python compare.py --help` shows the options."""

from lit_ort_tasks.commands.compare import main

if __name__ == "__main__":
    main()

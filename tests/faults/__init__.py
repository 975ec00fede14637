"""Faults in runs of train.py, and checks that the runs can be resumed."""

"""Faults in runs of train.py, and what the runs make of them."""

"""Regions: what is computed together in one iteration space, as data."""

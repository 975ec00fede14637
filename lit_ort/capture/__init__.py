"""Dynamo's graph of torch functions -> a graph of ATen operators, composite ones whole."""

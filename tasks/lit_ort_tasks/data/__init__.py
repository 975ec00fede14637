"""What the tasks train on: from text, tables and shards to batches."""

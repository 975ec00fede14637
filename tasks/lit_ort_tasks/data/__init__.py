"""The data of the tasks: from text, tables and shards to batches."""

"""A graph of ATen operators -> one graph of forward and backward, by AOTAutograd, and its parts for one run or two."""

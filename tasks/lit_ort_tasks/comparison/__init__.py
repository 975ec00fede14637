"""A comparison of strategies: their runs, one after the other, and the table, the report and the picture of them."""

"""From an FX graph of ATen operators to the joint graph, traced by AOTAutograd, and its partition into phases."""

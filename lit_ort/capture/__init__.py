"""From Dynamo's FX graph of torch functions to an FX graph of ATen operators that keeps composite operators."""

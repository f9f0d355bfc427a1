"""The vocabulary and the arithmetic: pure functions of values, on torch and safetensors."""

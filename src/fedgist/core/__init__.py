"""The vocabulary and the arithmetic: pure, on torch, safetensors and the standard library."""

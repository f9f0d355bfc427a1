"""Kernels in C, compiled once by ``fedgist compile``. Without them, torch's operations are used."""

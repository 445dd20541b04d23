"""Pipelined SGD: its iterations, its accuracy, and its time against synchronous steps."""

"""Measuring verifiers side by side: sweeps, intervals, tables and pictures."""

"""Experiments: what a setting costs and what it does, measured. Importing this package imports nothing heavy."""

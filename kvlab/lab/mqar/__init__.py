"""Associative recall by tiny trained models: how much a layer must keep to answer. `python -m kvlab.lab.mqar`."""

"""Training steps of whole models with and without compression: what ``end_to_end.py`` measures."""

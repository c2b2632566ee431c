"""Spoken words: synthesised with many voices to train and test on, and recorded ones to test on as well."""

"""Rules for torch's layers, one file per family."""

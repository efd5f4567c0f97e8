"""Rules for torch's layers, one file a family."""

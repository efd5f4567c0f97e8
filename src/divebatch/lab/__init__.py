"""The laboratory: our own runs. The library beside it never imports from here."""

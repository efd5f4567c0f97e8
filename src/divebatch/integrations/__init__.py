"""Adapters with a `Controller` for each framework's own way to train. Import the adapter you need by name."""

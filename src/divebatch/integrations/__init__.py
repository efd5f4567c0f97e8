"""Adapters: each framework's own way to train, with a `Controller` inside. Import the one you need by its name."""

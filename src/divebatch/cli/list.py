"""`divebatch list`."""


def list_experiments() -> None:
    """Show every experiment with its methods."""
    from divebatch.cli.work.list import show_experiments  # torch takes seconds, and help must not

    show_experiments()

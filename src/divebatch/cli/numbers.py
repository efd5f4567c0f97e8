"""Numbers as a terminal shows them: short, and nothing where there is none."""


def duration(seconds: float | None) -> str:
    """Two units at most.

    >>> duration(7.4), duration(83), duration(7260), duration(None)
    ('7s', '1m 23s', '2h 01m', '')
    """
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def rate(per_second: float | None) -> str:
    """Three digits and a thousands' letter.

    >>> rate(84.2), rate(1234.5), rate(2345678.0)
    ('84.2', '1.23k', '2.35M')
    """
    if per_second is None:
        return ""
    for bound, divisor, letter in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (float("inf"), 1e6, "M")):
        if per_second < bound:
            return f"{per_second / divisor:.3g}{letter}"
    return "inf"

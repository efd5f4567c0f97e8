"""What the saved state of an `AdaptiveLoader` must hold, by the loader that it is loaded into."""

from collections.abc import Mapping
from typing import Any

from divebatch.data.epoch_progress import EpochProgress
from divebatch.data.order import InParts, Order, generator_check
from divebatch.data.passes import Passes
from divebatch.data.sampler import batch_size_check
from divebatch.data.stream import MOST_OF_STREAM, StreamReader
from divebatch.state_checks import LARGEST, Check, anything, list_of, optional, same, table, whole, wrong


def loader_state(
    cutting: Mapping[str, Any], dataset: Any, order: Order | None, reader: StreamReader | None, generator: Any
) -> Check:
    """Accept the state of a loader over the same data that cuts them in the same way.

    Args:
        cutting: What decides which samples the rest of an epoch holds, and must be equal.
        dataset: What is loaded.
        order: The order of an epoch; None for a stream.
        reader: What reads a stream; None for any other dataset.
        generator: The random generator that the loader's settings hold, if any.
    """
    one_pass = EpochProgress.state_check(_most_samples(order), _order_check(order, dataset))
    sizes = batch_size_check(dataset_size=cutting["dataset_size"], drop_last=cutting["drop_last"])
    fields = table(
        {
            **{key: same(value) for key, value in cutting.items()},
            # A stream may not know its length before its first pass is over, here or there.
            **({"dataset_size": optional(_same_if_known(cutting["dataset_size"]))} if order is None else {}),
            "seed": whole(at_most=None),
            "sampler": table({}) if order is None else order.state_check(),
            "generator": generator_check(generator),
            "stream": table({}) if reader is None else reader.state_check(),
            "batch_size": sizes if reader is None else whole(1, MOST_OF_STREAM),
            **Passes.state_check(one_pass),
        }
    )

    def check(place: str, state: Any) -> None:
        fields(place, state)
        whole(at_least=state["batches_before"])(f"{place}.samples_before", state["samples_before"])
        if reader is not None and not reader.goes_on:
            _require_taken(place, state)

    return check


def _same_if_known(size: int | None) -> Check:
    return whole(1) if size is None else same(size)


def _most_samples(order: Order | None) -> int:
    """Of one pass. How many a stream or a user's own sampler has is not known before."""
    if order is None or not order.is_reproducible:
        return LARGEST
    return len(order) + isinstance(order, InParts)  # whose parts differ by one


def _order_check(order: Order | None, dataset: Any) -> Check:
    """That of a user's own sampler is saved, as it cannot be drawn again; of others there is none."""
    if order is None or order.is_reproducible:
        return same(None)
    size = len(dataset) if hasattr(dataset, "__len__") else LARGEST

    def check(place: str, value: Any) -> None:
        list_of(anything)(place, value)
        if any(isinstance(each, int) for each in value):  # a sampler may also draw names, which only the dataset knows
            list_of(whole(-size, size - 1))(place, value)

    return check


def _require_taken(place: str, state: Mapping[str, Any]) -> None:
    """The batches that were taken from a stream are those of the pass under way."""
    taken = sum(size * count for size, count in state["stream"]["taken"])
    delivered = state["pass"]["samples"] if state["pass"] else 0
    if taken != delivered:
        expected = f"the {delivered} samples of the pass under way"
        raise wrong(f"{place}.stream.taken: the number of its samples", taken, expected)

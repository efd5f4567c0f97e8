"""What a policy may see of the past."""

import json
from dataclasses import asdict

from divebatch import Decision, Diversity, Measurement
from divebatch.measurement import History


def seen(*, loss: float | None = None, sq_norm: float | None = None) -> Measurement:
    diversity = None if sq_norm is None else Diversity.from_noise(1.0, sq_norm, 100)
    return Measurement(epoch=1, batch_size=128, dataset_size=100, loss=loss, diversity=diversity)


def test_the_first_and_the_best_loss_are_kept():
    history, since = History(), []
    for loss in (3.0, 2.0, 2.5, 2.0, 1.9):
        history = history.with_epoch(seen(loss=loss))
        since.append(history.epochs_since_best)
    assert (history.first_loss, history.best_loss, since) == (3.0, 1.9, [0, 0, 1, 2, 0])


def test_the_first_gradient_norm_is_the_first_that_means_something():
    history = History()
    for sq_norm in (None, -1.0, 4.0, 2.0):
        history = history.with_epoch(seen(sq_norm=sq_norm))
    assert history.first_sq_norm == 4.0


def test_epochs_at_a_size_count_from_its_change():
    history = (
        History().with_epoch(seen()).with_decision(128, Decision(batch_size=128, unclamped=9.0)).with_epoch(seen())
    )
    assert (history.decisions_at_size, history.previous_batch_size, history.unclamped) == (2, None, 9.0)
    history = history.with_decision(128, Decision(batch_size=256))
    assert (history.decisions_at_size, history.previous_batch_size, history.unclamped) == (0, 128, None)
    assert history.with_epoch(seen()).decisions_at_size == 1


def test_the_fastest_epoch_of_a_size_counts():
    history = History().with_throughput(256, 50.0).with_throughput(128, 20.0).with_throughput(256, 40.0)
    assert history.throughputs == ((128, 20.0), (256, 50.0))


def test_it_comes_back_from_any_format():
    history = History(first_loss=2.0, unclamped=5.5).with_throughput(256, 50.0)
    assert History.from_dict(asdict(history)) == History.from_dict(json.loads(json.dumps(asdict(history)))) == history

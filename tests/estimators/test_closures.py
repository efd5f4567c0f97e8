"""Steps that make their gradients by a closure, as Lightning's do: `optimizer.step(closure)`."""

from collections.abc import Callable

import pytest
from torch import Tensor
from torch.optim import SGD, Optimizer

from divebatch import AdaptiveLoader, Controller, Diversity, micro_batches
from divebatch.estimators import AcrossRanks, Estimator, Moments, Split, TrainingContext
from divebatch.policies import NoiseScale
from reference.delivery import Delivered, attach
from reference.per_sample import dataset, mean_loss, mlp, train

CASES: dict[str, Callable[[], Estimator]] = {"split": Split, "moments": Moments, "ranks": AcrossRanks}
DATA = dataset(22)
any_case = pytest.mark.parametrize("case", CASES)


class Searching(SGD):
    """Calls its closure a second time, as a line search does."""

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        loss = super().step(closure)
        closure()
        return loss


def measured(
    case: str, optimizer: type[Optimizer], call: Callable[[Optimizer, Callable[[], Tensor]], None]
) -> Diversity:
    model, loader, estimator = mlp(), AdaptiveLoader(DATA, 4, seed=0), CASES[case]()
    stepping = optimizer(model.parameters(), lr=0.0)
    attach(estimator, TrainingContext(model, loader, stepping))
    estimator.start()
    for batch in loader:

        def closure(batch=batch) -> Tensor:
            stepping.zero_grad()
            for (x, y), share in micro_batches(batch, 2):
                loss = mean_loss(model(x), y) * share
                loss.backward()
            return loss

        call(stepping, closure)
    return estimator.finish()


def plain(optimizer: Optimizer, closure: Callable[[], Tensor]) -> None:
    closure()
    optimizer.step()


@any_case
def test_a_step_with_a_closure_counts_the_batch_of_that_closure(case: str):
    expected = measured(case, SGD, plain)
    assert measured(case, SGD, lambda optimizer, closure: optimizer.step(closure)) == expected
    assert measured(case, SGD, lambda optimizer, closure: optimizer.step(closure=closure)) == expected


def test_a_closure_called_again_counts_once():
    assert measured("moments", Searching, lambda optimizer, closure: optimizer.step(closure)) == measured(
        "moments", SGD, plain
    )


def test_a_step_gives_back_what_its_closure_gave():
    given = []
    measured("moments", SGD, lambda optimizer, closure: given.append(optimizer.step(closure)))
    assert len(given) == 6
    assert all(isinstance(loss, Tensor) for loss in given)


def test_a_batch_left_out_before_its_backward_pass_is_in_no_chunk_of_split():
    model, loader = mlp(), AdaptiveLoader(DATA, 4, shuffle=False)
    optimizer = SGD(model.parameters(), lr=0.0)
    control = Controller(model, optimizer, loader, NoiseScale(16), estimator="split")
    by_hand = Split()
    twin, delivered = mlp(), [0]
    twin_optimizer = SGD(twin.parameters(), lr=0.0)
    attach(by_hand, TrainingContext(twin, Delivered(lambda: delivered[0]), twin_optimizer))
    by_hand.start()
    for index, batch in enumerate(loader):
        if index in (0, 3):
            continue  # as a loop does with a loss that is not finite
        delivered[0] += len(batch[0])
        for network, stepping in ((model, optimizer), (twin, twin_optimizer)):
            train(network, stepping, [batch], parts_of=2)
    assert control.step().diversity == pytest.approx(by_hand.finish().of(len(DATA)).value, rel=1e-12)

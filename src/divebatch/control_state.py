"""What the saved state of a `Controller` must hold, by the controller that it is loaded into."""

from collections.abc import Mapping
from typing import Any

from divebatch.data.loader import AdaptiveLoader
from divebatch.errors import ArgumentError, CheckpointError
from divebatch.lr.rates import Rates
from divebatch.measurement import History
from divebatch.measuring import Measuring
from divebatch.policies import Policy
from divebatch.size_limit import SizeLimit
from divebatch.state_checks import Check, list_of, number, row_of, same, same_settings, table, whole, wrong
from divebatch.step_count import StepCount

STATE_VERSION = 1


def control_state(
    settings: Mapping[str, Any], policy: Policy, loader: AdaptiveLoader, measuring: Measuring, rates: Rates
) -> Check:
    """Accept the state of a controller with these settings and parts; nothing is changed by asking."""
    fields = table(
        {
            "version": same(STATE_VERSION),
            "settings": same_settings(settings),
            "epoch": whole(),
            "loader": loader._state_check(),
            "measuring": measuring.state_check(),
            "steps": StepCount.state_check(),
            "rates": rates.state_check(),
            "history": History.state_check,
            "limit": SizeLimit.state_check,
            "changes": list_of(row_of(whole(), whole(1), number(at_least=0))),
        }
    )

    def check(place: str, state: Any) -> None:
        fields(place, state)
        _require_agreement(place, state)
        _require_start(f"{place}.rates.couplings.0.first_batch_size", state, policy)

    return check


def _require_start(place: str, state: Mapping[str, Any], policy: Policy) -> None:
    first = state["rates"]["couplings"][0]["first_batch_size"]
    try:
        policy.check_start(first)
    except ArgumentError as error:
        raise CheckpointError(f"{place} is {first} in the checkpoint: {error}") from error


def _require_agreement(place: str, state: Mapping[str, Any]) -> None:
    """Raise where one part is ahead of what another one has delivered."""
    loader, steps = state["loader"], state["steps"]
    in_pass = loader["pass"]["batches"] if loader["pass"] else 0
    delivered = loader["batches_before"] + in_pass
    if state["epoch"] != loader["epoch"]:
        raise wrong(f"{place}.epoch", state["epoch"], f"the loader's epoch, {loader['epoch']},")
    whole(at_most=delivered)(f"{place}.steps.since_step", steps["since_step"])
    if loader["pass"]:
        stepped = sum(taken * count for taken, count in steps["inner"]) + steps["at_end"][0]
        whole(at_most=in_pass)(f"{place}.steps.inner and at_end: the number of their batches", stepped)
    for index, schedule in enumerate(state["rates"]["steps"]):
        whole(at_most=delivered)(f"{place}.rates.steps.{index}.called_at", schedule["called_at"])

"""The lead of the host: it covers what the host needs, and is short where it is of no use."""

from __future__ import annotations

import pytest

from dist_tune.measure.clocks import LONGEST_MS, MAX_LEAD_MS, Lead


def after(host_ms: float, n_replays: int, *, waits: bool = False) -> tuple[Lead, list[bool]]:
    """The lead after some replays of a step, and which of them the host had queued before the device began."""
    lead, ahead = Lead(), []
    for _ in range(n_replays):
        lead_ms = lead.ms()
        ahead.append(not waits and host_ms < lead_ms)
        lead.add(lead_ms + host_ms if waits else host_ms, is_ahead=ahead[-1])
    return lead, ahead


@pytest.mark.parametrize(("host_ms", "n_missed"), [(0.3, 0), (4.3, 0), (9.0, 0), (12.0, 1), (25.0, 2), (60.0, 2), (80.0, 3), (95.0, 3)])
def test_the_host_is_ahead_from_the_first_replays_on(host_ms: float, n_missed: int):
    """Three untimed ones come before those that count."""
    _, ahead = after(host_ms, 8)
    assert ahead == [False] * n_missed + [True] * (8 - n_missed)


@pytest.mark.parametrize(("host_ms", "lead_ms"), [(0.3, 0.45), (4.3, 6.45), (25.0, 28.0), (60.0, 63.0)])
def test_a_lead_is_half_as_long_again_as_the_host_needs_but_for_long_hosts(host_ms: float, lead_ms: float):
    assert after(host_ms, 8)[0].ms() == pytest.approx(lead_ms)


@pytest.mark.parametrize("host_ms", [0.5, 20.0, 400.0])
def test_a_step_that_waits_for_its_device_has_no_long_lead(host_ms: float):
    assert after(host_ms, 4, waits=True)[0].ms() <= MAX_LEAD_MS


def test_a_lead_has_an_end():
    """A host that needs a second cannot be outrun."""
    lead = Lead()
    for _ in range(20):
        assert lead.ms() <= LONGEST_MS
        lead.add(1000.0, is_ahead=False)
    assert lead.ms() <= MAX_LEAD_MS


def test_what_is_queued_keeps_the_device_busy_as_well():
    lead, _ = after(4.0, 3)
    assert [lead.ms(1.0, n_queued) for n_queued in (2, 3, 50)] == pytest.approx([4.0, 3.0, 1.0])


@pytest.mark.parametrize(
    ("shortest_ms", "n_queued", "lead_ms"),
    [(0.3, 0, 0.45), (0.3, 1, 0.3), (2.5, 0, 2.5), (2.5, 100, 2.5), (80.0, 0, MAX_LEAD_MS), (80.0, 100, MAX_LEAD_MS)],
)
def test_the_device_works_half_of_the_time_at_most(shortest_ms: float, n_queued: int, lead_ms: float):
    """However much is queued: at its power limit a candidate would pay for those before it."""
    assert after(0.3, 8)[0].ms(shortest_ms, n_queued) == pytest.approx(lead_ms)


def test_a_full_launch_queue_is_no_slow_host():
    """The host was ahead all the same."""
    lead, _ = after(1.0, 3)
    lead.add(80.0, is_ahead=True)
    assert lead.ms() == pytest.approx(1.65)


def test_a_host_that_is_slow_every_second_time_is_a_slow_host():
    lead, _ = after(40.0, 8)
    lead.add(1.0, is_ahead=True)
    assert lead.ms() > 30.0


def test_after_some_slow_replays_a_long_lead_is_tried_again():
    """A host that was busy for a while, and then needs 40 ms as before."""
    lead, _ = after(40.0, 8)
    for _ in range(8):
        lead.add(200.0, is_ahead=False)
    assert lead.ms() <= MAX_LEAD_MS
    ahead = []
    for _ in range(20):
        ahead.append(lead.ms() > 40.0)
        lead.add(40.0, is_ahead=ahead[-1])
    assert all(ahead[-8:])


def test_a_hiccup_of_the_host_is_forgotten():
    lead, _ = after(1.0, 3)
    lead.add(80.0, is_ahead=False)
    for _ in range(6):
        lead.add(1.0, is_ahead=True)
    assert lead.ms() == pytest.approx(1.5)

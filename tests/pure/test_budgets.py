"""When money may be spent, as pure rules; and how limits and reports are written."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill import budgets, limits, reports
from tidemill.budgets import Position
from tidemill.errors import BudgetExceeded, QuotaExceeded
from tidemill.types import Lane, Limits, Purse, Usage, UsageSum

amounts = st.integers(0, 1000)
positions = st.builds(
    Position,
    limit=amounts,
    spent=amounts,
    reserved=amounts,
    in_flight=amounts,
    own_reserved=amounts,
    own_in_flight=amounts,
)


class TestTurn:
    @given(positions, amounts)
    def test_what_is_held_fits_whatever_happens(self, at: Position, amount: int) -> None:
        """If every line in flight costs all that it may, the limit is not crossed."""
        if budgets.turn(at, amount) == "held":
            own = max(at.own_reserved, at.own_in_flight + amount)
            assert at.spent + at.reserved + at.in_flight + own <= at.limit

    @given(positions, amounts)
    def test_who_waits_can_still_be_let_in(self, at: Position, amount: int) -> None:
        """Once those in flight have ended and cost nothing; who is over cannot."""
        alone = Position(
            limit=at.limit, spent=at.spent, reserved=at.reserved, own_reserved=at.own_reserved
        )
        after = budgets.turn(alone, amount)
        assert after == ("over" if budgets.turn(at, amount) == "over" else "held")

    @given(positions, amounts, amounts)
    def test_less_is_never_refused_where_more_is_let_in(
        self, at: Position, amount: int, more: int
    ) -> None:
        """The verdict only gets harder as the amount grows."""
        rank = {"held": 0, "wait": 1, "over": 2}
        less, greater = budgets.turn(at, amount), budgets.turn(at, amount + more)
        assert rank[less] <= rank[greater]


class TestAdmit:
    def _purse(self, **changes: object) -> Purse:
        return Purse(kind="team", id="t", **changes)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("spent", "committed", "hold", "refused"),
        [
            (0, 0, 10, False),
            (9, 0, 1, False),
            (9, 0, 2, True),
            (10, 0, 0, True),
            (5, 5, 0, True),
            (5, 4, 2, True),
        ],
    )
    def test_a_used_up_budget_admits_nothing(
        self, spent: int, committed: int, hold: int, refused: bool
    ) -> None:
        """What is reserved counts as spent; a reservation must fit into what is left."""
        purse = self._purse(spent=spent, committed=committed, limits=Limits(monthly_budget=10))
        if refused:
            with pytest.raises(BudgetExceeded, match="team"):
                budgets.admit([self._purse(), purse], hold=hold)
        else:
            budgets.admit([self._purse(), purse], hold=hold)

    def test_what_is_enqueued_is_limited_and_interactive_requests_are_not(self) -> None:
        """A full queue says nothing against a chat."""
        purse = self._purse(lines=5, tokens=50, limits=Limits(enqueued_lines=5, enqueued_tokens=9))
        budgets.admit([purse])
        with pytest.raises(QuotaExceeded) as caught:
            budgets.admit([purse], lines=1)
        assert caught.value.code == "line_limit_exceeded"
        with pytest.raises(QuotaExceeded) as caught:
            budgets.admit([purse], tokens=1)
        assert caught.value.code == "token_limit_exceeded"


class TestMonth:
    @pytest.mark.parametrize(
        ("day", "month"),
        [("2026-01-01T00:00:00", 202601), ("2025-12-31T23:59:59", 202512)],
    )
    def test_months_change_at_midnight_utc(self, day: str, month: int) -> None:
        """Wherever the server stands."""
        at = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
        assert budgets.month(at) == month


class TestLimits:
    names = st.lists(st.text("abc*-", min_size=1, max_size=3), max_size=2).map(tuple)

    @given(
        st.builds(
            Limits,
            models=st.none() | names,
            providers=st.none() | st.dictionaries(st.text("ab", min_size=1), names, max_size=2),
            lane=st.sampled_from(Lane),
            requests_per_minute=st.none() | amounts,
            storage_bytes=st.none() | amounts,
            monthly_budget=st.none() | st.integers(0, 10**15),
        )
    )
    def test_limits_read_back_as_they_were_written(self, one: Limits) -> None:
        """Nothing is lost between the store, the API and the command line."""
        assert limits.parse(limits.written(one)) == one


class TestReports:
    NOW = int(datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp())

    def test_a_report_has_whole_days(self) -> None:
        """This month by default; the last day is in it."""
        query = reports.query(since=None, until=None, by=None, owner="o", now=self.NOW)
        assert (query.by, query.owner) == (("day", "model"), "o")
        assert query.since_at == int(datetime(2026, 11, 1, tzinfo=UTC).timestamp())
        assert query.until_at == int(datetime(2026, 12, 1, tzinfo=UTC).timestamp())
        one = reports.query(
            since="2026-02-28", until="2026-02-28", by="tier, day,tier", owner=None, now=self.NOW
        )
        assert one.by == ("day", "tier")
        assert one.until_at - one.since_at == 86_400

    def test_csv_is_read_back_and_starts_no_formula(self) -> None:
        """Commas and quotes survive; a name that begins like a formula is text."""
        sums = [
            UsageSum(group={"model": name}, rows=1, usage=Usage(input=2), cost=3)
            for name in ('a,"b"', "=1+1", "@x", "plain")
        ]
        rows = list(csv.DictReader(io.StringIO(reports.as_csv(("model",), sums))))
        assert [row["model"] for row in rows] == ['a,"b"', "'=1+1", "'@x", "plain"]
        assert {row["cost"] for row in rows} == {"0.000003"}

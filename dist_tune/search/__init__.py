"""Which candidate runs next, and which one wins.

Pure: fed with numbers that all ranks have agreed on, it answers the same on every rank.
Knows neither Triton nor torch.distributed nor clocks nor disk.
"""

from dist_tune.search.choice import Agreed, Objective, Verdict
from dist_tune.search.engine import Search
from dist_tune.search.ledger import Ledger
from dist_tune.search.plan import Known, Plan, Replay, SearchName, Standing, Trial
from dist_tune.search.strategies import STRATEGIES, SearchStrategy, Strategy, make_strategy
from dist_tune.search.tally import Account, Report, account

__all__ = [
    "STRATEGIES", "Account", "Agreed", "Known", "Ledger", "Objective", "Plan", "Replay", "Report", "Search", "SearchName",
    "SearchStrategy", "Standing", "Strategy", "Trial", "Verdict", "account", "make_strategy",
]  # fmt: skip

"""Published figures that ours are printed with, and the test set each belongs to.

MovieLens-1M has two test sets in the literature: 77 % of its interactions share their (user,
timestamp) with another, so the order among ties decides which item comes last. "SASRec order" is
the stable order of the file after dropping items with fewer than five ratings; "HSTU order" comes
from an unstable sort and gives 25.9 % of the users another test item. Rows of one order must not be
compared with rows of the other. Touch this when a figure is published.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedRow:
    """One published result: full ranking with seen items filtered."""

    model: str
    hr10: float
    ndcg10: float
    order: str  # "SASRec" or "HSTU"
    source: str


ML_1M = (
    PublishedRow(
        "SASRec, BCE", 0.2500, 0.1341, "SASRec", "Turning Dross Into Gold Loss (RecSys 2023)"
    ),
    PublishedRow(
        "BERT4Rec", 0.2843, 0.1537, "SASRec", "Turning Dross Into Gold Loss (RecSys 2023)"
    ),
    PublishedRow(
        "SASRec, full cross-entropy",
        0.3152,
        0.1821,
        "SASRec",
        "Turning Dross Into Gold Loss (RecSys 2023)",
    ),
    PublishedRow(
        "SASRec, 3,000 negatives",
        0.3159,
        0.1857,
        "SASRec",
        "Turning Dross Into Gold Loss (RecSys 2023)",
    ),
    PublishedRow(
        "gSASRec, 256 negatives",
        0.3003,
        0.1726,
        "SASRec",
        "gSASRec (RecSys 2023), epoch chosen on validation",
    ),
    PublishedRow("SASRec, sampled softmax", 0.2929, 0.1684, "SASRec", "a rerun in this order"),
    PublishedRow("HSTU", 0.3037, 0.1719, "SASRec", "a rerun in this order"),
    PublishedRow("FuXi-alpha", 0.3164, 0.1813, "SASRec", "a rerun in this order"),
    PublishedRow(
        "HSTU, request time known",
        0.3226,
        0.1880,
        "SASRec",
        "RecTools' HSTU tutorial, all 3,706 items, 1 seed",
    ),
    PublishedRow(
        "HSTU-large, request time known",
        0.3642,
        0.2164,
        "SASRec",
        "RecTools' HSTU tutorial, all 3,706 items, 1 seed",
    ),
    PublishedRow(
        "SASRec, sampled softmax",
        0.2853,
        0.1603,
        "HSTU",
        "generative-recommenders README, best epoch on the test item",
    ),
    PublishedRow(
        "HSTU",
        0.3097,
        0.1720,
        "HSTU",
        "generative-recommenders README, best epoch on the test item",
    ),
    PublishedRow(
        "HSTU-large",
        0.3294,
        0.1893,
        "HSTU",
        "generative-recommenders README, best epoch on the test item",
    ),
)

# The best published figures in SASRec's order, by what the model knows of the request's time. They
# need not come from one row: without the time, HR@10 is FuXi-alpha's and NDCG@10 SASRec's.
BEST = {
    "known": {"HR@10": 0.3642, "NDCG@10": 0.2164},
    "unused": {"HR@10": 0.3164, "NDCG@10": 0.1857},
}

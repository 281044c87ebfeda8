"""Candidates have the context of their request, behaviours their own."""

import torch

from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.rank_query import RankQuery, context_of_tokens


def query(codes, candidates, **context):
    codes_T = torch.tensor(codes, dtype=torch.int64)
    empty = torch.zeros(len(codes), 0)
    new = EncodedHistory(codes_T, codes_T, empty, context={"surface": codes_T})
    return RankQuery(None, new, torch.arange(candidates), 0, context)


def test_tokens_are_in_the_order_of_queries_behaviours_then_candidates():
    queries = [query([1, 2], 2, surface=3), query([], 1), query([2], 0)]
    found = context_of_tokens(queries, ["surface"])
    assert found["surface"].tolist() == [1, 2, 3, 3, 0, 2]
    assert context_of_tokens(queries, []) == {}
    assert queries[0].with_candidates(torch.arange(5)).context == {"surface": 3}

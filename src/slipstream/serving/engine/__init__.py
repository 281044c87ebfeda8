"""A bundle that answers: no HTTP, no threads, no policy.

    items.py         original ids and the rows that stand for them
    encoding.py      a history as the model reads it, and its digest
    prefix.py        cached keys and values, and the memory they lie in
    prefix_steps.py  one sequence through the layers, step by step
    engine.py        prefill, rank, retrieve

Touch this when scores are computed in another way.
"""

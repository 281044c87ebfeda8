"""One engine with its compute thread: what it admits, what runs next, where prefixes come from.

    instance_config.py  settings, and what an instance returns
    cost_model.py       seconds of a pass on this machine
    estimates.py        seconds of a request, and what fits before its deadline
    trigger.py          which pre-inferences are admitted
    scheduler.py        which work the compute thread does next
    job_runner.py       between the event loop and the compute thread
    prefix_manager.py   finds, computes and demotes prefixes
    instance.py         preinfer, rank, retrieve
    stats.py            counters and gauges

Touch this when a request takes another way through an instance.
"""

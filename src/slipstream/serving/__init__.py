"""Serving: the engine, prefix cache, trigger, expander and instance of relay-race inference, and
the apps around them.
"""

"""One serving instance: its compute thread, what it admits, where it finds prefixes."""

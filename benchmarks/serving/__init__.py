"""The largest rate and the longest history that hold a latency limit."""

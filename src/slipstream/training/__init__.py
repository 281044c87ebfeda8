"""The loop, losses, metrics, evaluation, checkpoints and reports."""

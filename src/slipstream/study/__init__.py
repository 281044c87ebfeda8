"""Studies: the same training under many settings and seeds, compared with intervals and tests."""

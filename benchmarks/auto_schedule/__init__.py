"""`train.schedule=auto` against the plain loop and schedules set by hand."""

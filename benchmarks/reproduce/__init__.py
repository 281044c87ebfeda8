"""Published tables, trained again and printed with the published rows."""

"""What each schedule hides behind compute, on a slow link and a slow disk."""
